"""What was found out about this device, kept in a file: winners, certificates, what was withdrawn.

A work is an op at one shape, its rows rounded up to a bucket; it has a name. A winner names one of
the op's own candidates, and the op looks the name up among them. So a file can make an op slower,
and it cannot make it run anything else. All candidates of an op give the same bytes: winners change
no bit and are in no fingerprint. A certificate says for which numbers of rows the vendor library's
product had the bytes of our own. What differed once is withdrawn, and stays so.

Data shipped with the kernels have the same format. `choose` asks the user's file first, then them;
where neither knows a work, the op's rule decides.

Each identity (device, driver, versions, kernels) has its own file. Processes share it: they write
it whole, under a lock, and merge what they found. A file that is damaged, foreign or writable by
others is ignored with a warning, and what it held is found again. Neither a link nor a pipe is
opened: that could lead elsewhere, or wait.

State: the findings of each device of this process, and the picks that asked them.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import _lru_cache_wrapper, cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from rl_consistency.kernels.core.compile_ahead import require_launches
from rl_consistency.kernels.core.kernels_hash import kernels_hash
from rl_consistency.kernels.core.launch import next_power_of_2

Candidate = TypeVar("Candidate")
Picked = TypeVar("Picked")

CACHE_VARIABLE = "RL_CONSISTENCY_CACHE"
"""Names the directory of what is found out here; the default is `~/.cache/rl_consistency`."""

LIBRARY_VARIABLES = ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that the vendor library reads; part of the identity."""

FOLDER = "findings"
"""Name of the folder in the cache directory; it is the user's alone (mode 0700)."""

SHIPPED = Path(__file__).with_name("shipped_findings.json")
"""What was measured on our own devices; copied from what `tune` wrote there."""

MOST_ROWS = 16384
"""The largest bucket; all larger numbers of rows share it."""

FEW_ROWS = 16
"""Numbers of rows from 2 up to this one share a bucket: no tile has fewer rows."""

RULE = "rule"
"""Kept in place of a winner for a work that was measured and has none."""

SHORTEST_US, LONGEST_US = 1e-3, 1e9
"""Microseconds between which a time is believed."""

MOST_PICKS = 4096
"""Answers that each pick remembers."""

MOST_BYTES = 1 << 26
"""The largest file that is read; one of a thousand works has 200 KB."""

PART = ".part."
"""Stands in the name of a file that is being written."""

UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a file of any content and owner raises."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""How files spell the dtypes that have a canonical order."""


def rows_bucket(rows: int) -> int:
    """1, `FEW_ROWS`, or the next power of two up to `MOST_ROWS`."""
    if rows <= 1:
        return 1
    return min(max(next_power_of_2(rows), FEW_ROWS), MOST_ROWS)


def work_name(op: str, *parts: Any, rows: int) -> str:
    """How files and reports spell a work: `matmul/nt/bf16/bf16/tma/n4096/k1024/m16`, say."""
    spelled = [DTYPE_NAMES.get(part, part) for part in parts]
    return "/".join([op, *map(str, spelled), f"m{rows_bucket(rows)}"])


def schedule_name(schedule: Any) -> str:
    """A schedule's own name, or its fields that are not defaults."""
    if isinstance(schedule, str):
        return schedule
    if hasattr(schedule, "name"):
        return schedule.name
    values = {f.name: (getattr(schedule, f.name), f.default) for f in fields(schedule)}
    return " ".join(f"{name}={value}" for name, (value, usual) in values.items() if value != usual)


def of_work(work: str, schedule: str) -> str:
    """How a candidate that was withdrawn is named."""
    return f"{work}: {schedule}"


@dataclass(frozen=True)
class Winner:
    """The fastest candidate of one work."""

    schedule: str
    """Name of the candidate, or `RULE`."""
    us: float = 0.0
    """Median time of the candidate, in microseconds; 0 where it was not recorded."""
    default_us: float = 0.0
    """Median time of what runs without a winner, likewise."""


@dataclass(frozen=True)
class Certificate:
    """The comparisons of the vendor library's product with our own, for one kind of product."""

    differing: int
    """Elements that differed; 0 admits the library."""
    rows: list[int]
    """Numbers of rows that were compared."""

    def with_more(self, other: Certificate) -> Certificate:
        """Both; one that is bad in either stays so."""
        rows = sorted({*self.rows, *other.rows})
        return Certificate(max(self.differing, other.differing), rows)


@dataclass
class _Content:
    """What a file holds."""

    winners: dict[str, Winner] = field(default_factory=dict)
    certificates: dict[str, Certificate] = field(default_factory=dict)
    withdrawn: dict[str, str] = field(default_factory=dict)
    """A certificate, or a candidate as `of_work` names it -> why."""

    @classmethod
    def parse(cls, content: Any) -> _Content:
        """The content of a file; an error of `UNUSABLE` for other fields or types."""
        winners = {work: Winner(**entry) for work, entry in content["winners"].items()}
        certificates = {n: Certificate(**entry) for n, entry in content["certificates"].items()}
        withdrawn = dict(content["withdrawn"].items())
        checks: list[tuple[str, dict[str, Any], Callable[[Any], bool]]] = [
            ("winner", winners, lambda w: type(w.schedule) is str),
            ("winner", winners, lambda w: _is_time(w.us) and _is_time(w.default_us)),
            ("certificate", certificates, lambda c: type(c.rows) is list),
            ("certificate", certificates, lambda c: {*map(type, (c.differing, *c.rows))} == {int}),
            ("reason", withdrawn, lambda reason: type(reason) is str),
        ]
        for kind, found, good in checks:
            for entry in found.values():
                if not good(entry):
                    raise TypeError(f"not a {kind}: {entry}")
        return cls(winners, certificates, withdrawn)


def _is_time(value: Any) -> bool:
    return type(value) is float and (value == 0.0 or SHORTEST_US <= value <= LONGEST_US)


@cache
def shipped() -> _Content:
    """What is shipped with the kernels."""
    return _Content.parse(json.loads(SHIPPED.read_text(encoding="utf-8")))


class Findings:
    """Winners by work, certificates by key, and what was withdrawn.

    Args:
        path: their file, read now and rewritten at each finding; None keeps them in memory.
        identity: what they hold for.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, str]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._told: set[str] = set()
        self._unsaved: dict[str, Winner] = {}  # found here, and not in the file yet
        self._held = self._read()

    @classmethod
    def of_device(cls, device: torch.device) -> Findings:
        """The findings of a device with the installed versions; in memory if it is no GPU."""
        if device.type != "cuda":
            return cls(None, {})
        identity = identity_of(device)
        return cls(findings_file(identity), identity)

    @property
    def winners(self) -> dict[str, Winner]:
        """Winners that are in force, by work."""
        found = {work: self.winner(work) for work in self._held.winners}
        return {work: winner for work, winner in found.items() if winner is not None}

    @property
    def withdrawn(self) -> dict[str, str]:
        """Certificates, and candidates as `of_work` names them, that differed: why."""
        return dict(self._held.withdrawn)

    def winner(self, work: str) -> Winner | None:
        """The winner of a work, if it has one that was not withdrawn."""
        found = self.finding(work)
        return None if found is None or found.schedule == RULE else found

    def finding(self, work: str) -> Winner | None:
        """The winner or `RULE`, if the work was measured and the winner not withdrawn since."""
        found = self._held.winners.get(work)
        return None if found is None or self.is_withdrawn(work, found.schedule) else found

    def is_withdrawn(self, work: str, schedule: str) -> bool:
        """Whether a candidate's bytes ever differed."""
        return of_work(work, schedule) in self._held.withdrawn

    def certificate(self, name: str) -> Certificate | None:
        """The comparisons for a key, good or bad; None where there were none."""
        return self._held.certificates.get(name)

    def certifies(self, name: str) -> bool:
        """Whether the library may be used for a key."""
        found = self._held.certificates.get(name)
        return found is not None and found.differing == 0 and not self.refuses(name)

    def refuses(self, name: str) -> bool:
        """Whether the certificate of a key was withdrawn, here or in what is shipped."""
        return name in self._held.withdrawn or name in shipped().withdrawn

    def keep(self, work: str, winner: Winner) -> None:
        """Take what was found for a work, also in the file."""
        require_launches("a winner")
        self._held.winners[work] = self._unsaved[work] = winner
        self._write()
        forget_picks()

    def certify(self, name: str, differing: int, rows: list[int]) -> None:
        """Add comparisons for a key, also in the file."""
        require_launches("a certificate")
        before = self._held.certificates.get(name, Certificate(0, []))
        self._held.certificates[name] = before.with_more(Certificate(differing, rows))
        self._write()

    def withdraw(self, name: str, reason: str) -> None:
        """Withdraw a certificate, or a candidate named by `of_work`, for good, also in the file."""
        require_launches("a withdrawal")
        self._held.withdrawn[name] = reason
        self._write()
        forget_picks()

    def ignore(self, work: str, reason: str) -> None:
        """Warn once that a winner is not used."""
        self._held.winners.pop(work, None)
        self._unsaved.pop(work, None)
        self._tell("winner", f"{self.path}: the winner of {work} is ignored: {reason}.")

    def _read(self) -> _Content:
        if self.path is None:
            return _Content()
        try:
            content = json.loads(own_text(self.path))
            if content["identity"] != self._identity:
                raise ValueError("it is of another device, driver or version")
            return _Content.parse(content)
        except FileNotFoundError:
            return _Content()
        except UNUSABLE as error:
            reason = f"{type(error).__name__}: {error}"
            self._tell("read", f"{self.path} is ignored ({reason}); it is made again.")
            return _Content()

    def _write(self) -> None:
        if self.path is None:
            return
        try:
            was_own = make_own(self.path.parent)
            # Without the lock, two processes that write at once could lose what one found.
            with locked(self.path.with_suffix(".lock")):
                if was_own:
                    self._merge(self._read())
                content = {name: dict(sorted(x.items())) for name, x in asdict(self._held).items()}
                replace_whole(self.path, {"identity": self._identity, **content})
            self._unsaved.clear()
        except OSError as error:
            text = f"{self.path} cannot be written ({error}); findings last for this process. Set"
            self._tell("write", f"{text} {CACHE_VARIABLE} to a directory with room.")

    def _merge(self, found: _Content) -> None:
        """Add what the file has. Its winners are newer than what was read or written before, and
        older than what could not be written yet."""
        held = self._held
        held.winners = held.winners | found.winners | self._unsaved
        for name, other in found.certificates.items():
            held.certificates[name] = held.certificates.get(name, other).with_more(other)
        held.withdrawn = found.withdrawn | held.withdrawn

    def _tell(self, kind: str, text: str) -> None:
        """Warn, once for each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"findings: {text} Nothing else is affected.", stacklevel=4)


_by_device: dict[torch.device, Findings] = {}
"""The findings of each device, process-wide."""

_picks: list[Callable[[], None]] = []
"""Empties what each pick remembers."""


def findings_of(device: torch.device) -> Findings:
    """The findings of a device; the first call reads them from its file."""
    held = _by_device.get(device)
    if held is None:
        held = _by_device[device] = Findings.of_device(device)
    return held


def withdrawn_schedules() -> list[str]:
    """`work: schedule` of every withdrawn candidate that this process knows of."""
    names = {name for held in _by_device.values() for name in held.withdrawn if ": " in name}
    return sorted(names)


def choose(
    device: torch.device | None, work: str, own: Iterable[Candidate], alike: str = ""
) -> Candidate | None:
    """The schedule of a work among an op's `own`, as the user's file or the shipped data have it;
    None where the op's rule decides.

    Args:
        device: whose findings count; None asks the shipped data alone.
        work: the work.
        own: candidates that its operands admit.
        alike: the work whose shipped winner stands for this one too.
    """
    by_name = {schedule_name(schedule): schedule for schedule in own}
    held = None if device is None else findings_of(device)
    if held is not None and (winner := held.winner(work)) is not None:
        if winner.schedule in by_name:
            return by_name[winner.schedule]
        held.ignore(work, f"{winner.schedule!r} is no schedule of this op")
    winner = shipped().winners.get(alike or work)
    if winner is None or (held is not None and held.is_withdrawn(work, winner.schedule)):
        return None
    return by_name.get(winner.schedule)


def picked_once(pick: Callable[..., Picked]) -> _lru_cache_wrapper[Picked]:
    """A pick that remembers its answers until a winner changes."""
    remembered = lru_cache(maxsize=MOST_PICKS)(pick)
    forget_on_change(remembered.cache_clear)
    return remembered


def forget_on_change(forget: Callable[[], None]) -> None:
    """Have `forget` called whenever a winner changes: what it empties was made from picks."""
    _picks.append(forget)


def forget_picks() -> None:
    """Let every pick look at the findings again."""
    for forget in _picks:
        forget()


def cache_directory() -> Path:
    """The directory of the files; only this function reads `CACHE_VARIABLE`.

    RuntimeError where the user, or the one that the variable names, has no home; FileNotFoundError
    where it names a relative path and the process's directory is gone.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()  # a process may change its directory
    return Path.home() / ".cache" / "rl_consistency"


def findings_file(identity: Mapping[str, str]) -> Path | None:
    """The file of one identity. With a file for each, no environment replaces what another has
    withdrawn. None, with a warning, where there is no place for it."""
    name = "".join(c if c.isalnum() else "_" for c in identity["device"])
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    try:
        return cache_directory() / FOLDER / f"{name}_{digest}.json"
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"findings last for this process: {error}. Set {CACHE_VARIABLE} to a directory.",
            stacklevel=2,
        )
        return None


def identity_of(device: torch.device) -> dict[str, str]:
    """Device, driver, versions and the hash of the kernels, by name."""
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cublaslt": _library_version(),
        "driver": _driver_version(),
        "triton": triton.__version__,
        "kernels": kernels_hash(),
    } | {name: os.environ.get(name, "") for name in LIBRARY_VARIABLES}


def _library(name: str) -> Any:
    """A library of the driver, or one that torch has loaded; None where there is none."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@cache
def _library_version() -> str:
    found = _library(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    if found is None:
        return "unknown"
    found.cublasLtGetVersion.restype = ctypes.c_size_t
    return str(found.cublasLtGetVersion())


@cache
def _driver_version() -> str:
    """The CUDA version that the driver supports and its release, such as "13000/580.159.04"; either
    may change alone."""
    supported, release = ctypes.c_int(), ctypes.create_string_buffer(80)
    driver, management = _library("libcuda.so.1"), _library("libnvidia-ml.so.1")
    if driver is not None:
        driver.cuDriverGetVersion(ctypes.byref(supported))
    if management is not None and not management.nvmlInit_v2():
        management.nvmlSystemGetDriverVersion(release, len(release))
        management.nvmlShutdown()
    return f"{supported.value or 'unknown'}/{release.value.decode() or 'unknown'}"


def own_text(path: Path) -> str:
    """The text of a file that only this user can have written; PermissionError for any other."""
    with os.fdopen(_own_descriptor(path, os.O_RDONLY), encoding="utf-8") as file:
        _require_own(path.parent, os.lstat(path.parent))
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"it has {size} bytes, and no such file has more than {MOST_BYTES}")
        return file.read()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside the block no other process holds the lock of this file, which is made if missing."""
    descriptor = _own_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_own(folder: Path) -> bool:
    """Make a folder that is this user's alone, and say whether only this user could write there
    before."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if is_own and found.st_mode & 0o077:
        folder.chmod(found.st_mode & 0o700)  # who made it read-only meant it
    _require_own(folder, os.lstat(folder))
    return not found.st_mode & 0o022


def replace_whole(path: Path, content: Any) -> None:
    """Write a file of JSON in one piece, under its lock. An error leaves the old file as it was;
    what a killed process left unfinished is removed."""
    for left in path.parent.glob(f"{glob.escape(path.name)}{PART}*"):
        left.unlink(missing_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + PART)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(name, path)
    except BaseException:  # an interrupt too leaves no part behind
        Path(name).unlink(missing_ok=True)  # it may have come after the rename
        raise


def _own_descriptor(path: Path, flags: int) -> int:
    """An open file of this user's alone; PermissionError for any other."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode=0o600)
    try:
        _require_own(path, found := os.fstat(descriptor))
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is no file")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} is a link")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & 0o022:
        raise PermissionError(f"others may write to {path}")
