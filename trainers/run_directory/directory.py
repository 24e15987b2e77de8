"""A run's directory: what may be started or resumed there, and what a new run removes.

`manifest.json` says that the directory is a run's and under which names the run writes. It is there
before they are, so that each of them is the run's own; where it does not list a name, that is the
user's. A run writes into no other, and removes no other. (wandb keeps its own directory, whose
names do not collide; nothing here touches it.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from rl_consistency.numerics.files import (
    discard,
    is_leftover,
    remove_leftovers,
    seal,
    unseal,
    write_whole,
)
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.parity.replay import FILES as FILES_OF_A_BUNDLE
from rl_consistency.parity.replay import LOCALIZATION, TEXTS
from rl_consistency.trainers.config.recipe import RunConfig, dump_config
from rl_consistency.trainers.run_directory.checkpoint import (
    REWARD_FUNCTION,
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    remedy,
    strangers,
)

MANIFEST, LOCK = "manifest.json", ".rl_consistency.lock"
CONFIG, REFERENCE = "config.yaml", "reference.safetensors"
METRICS, DIGESTS, SAMPLES = "metrics.jsonl", "digests.jsonl", "samples.jsonl"
FILES = (CONFIG, METRICS, DIGESTS, SAMPLES, REFERENCE, "summary.json", "report.html", "drift.png")
CHECKPOINTS, REPLAY = "checkpoints", "replay"
NAMES = (*FILES, CHECKPOINTS, REPLAY)
FORMAT = 1
_OTHER = "choose another directory with --set run.output_dir=DIR"


class RunDirectoryError(ValueError):
    """A run directory that cannot be started in or resumed from."""


def check_directory(
    config: RunConfig, *, resume: bool, overwrite: bool, dry_run: bool = False
) -> str | None:
    """RunDirectoryError, with its remedy, where the run cannot be started or continued; of a dry
    run, which writes nothing, what the run itself would have to be told."""
    directory = config.run.output_dir
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise RunDirectoryError(f"run.output_dir: {there} is not a directory: {_OTHER}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"run.output_dir: nothing can be written into {there}: {_OTHER}.")
    require_kinds(directory)
    listed = _listed(directory)
    if unlisted := [n for n in NAMES if n not in listed and os.path.lexists(directory / n)]:
        raise RunDirectoryError(
            f"{directory} holds {', '.join(unlisted)}, which no run of ours wrote: its {MANIFEST} "
            f"is missing or does not list it. Move that away, or {_OTHER}."
        )
    if links := [f for n in (*FILES, MANIFEST, LOCK) if (f := directory / n).is_symlink()]:
        raise RunDirectoryError(f"{links[0]} is a link: put the file in its place, or {_OTHER}.")
    if resume and not listed:
        raise RunDirectoryError(f"{directory} holds no run to resume; leave out --resume.")
    if listed and not resume:
        remedy = f"continue it with --resume, remove it with --overwrite, or {_OTHER}."
        held = f"{directory} already holds a run; {remedy}"
        if dry_run:
            return held
        if not overwrite:
            raise RunDirectoryError(held)
        _require_removable(config)
    return None


def is_run(directory: Path) -> bool:
    """Whether a run has written here, or this is a copy of such a directory."""
    there = {
        name for name in (LOCK, MANIFEST, CONFIG, METRICS) if os.path.lexists(directory / name)
    }
    return LOCK in there or (METRICS in there and len(there) > 1)


def require_kinds(directory: Path) -> None:
    """RunDirectoryError where something else stands in the place of a run's file or folder.

    A pipe would be waited for, a folder could not be replaced at the end of a run.
    """
    for name in (*NAMES, MANIFEST, LOCK):
        path, folder = directory / name, name in (CHECKPOINTS, REPLAY)
        if os.path.lexists(path) and not (path.is_dir() if folder else path.is_file()):
            kind = "directory" if folder else "regular file"
            raise RunDirectoryError(f"{path} is no {kind}, and a run needs one: move it away.")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory for this process; RunDirectoryError if another one does.

    The system releases the lock when the process ends, however it ends. Processes that it forks
    (a pool of a reward function) do not hold it and may live on.
    """
    with ExitStack() as stack:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            file = stack.enter_context(FileIO(os.open(directory / LOCK, flags, 0o666), "w"))
            _locks.add(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"another process is at work in {directory}: wait for it or stop it"
            raise RunDirectoryError(f"{problem}, or {_OTHER}.") from error
        except OSError as error:
            problem = f"{directory / LOCK} cannot be locked ({error.strerror})"
            raise RunDirectoryError(f"{problem}: {_OTHER}.") from error
        yield


_locks: WeakSet[FileIO] = WeakSet()
os.register_at_fork(after_in_child=lambda: [file.close() for file in _locks])


@contextmanager
def full_disk_explained(directory: Path) -> Iterator[None]:
    """Say what helps where the disk has no room for one of the run's files."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunDirectoryError(f"{error}. {remedy(directory / CHECKPOINTS)}") from error


def open_directory(config: RunConfig, *, overwrite: bool) -> None:
    """Remove what an earlier run left, and save the config; the directory is locked by now."""
    check_directory(config, resume=False, overwrite=overwrite)
    directory = config.run.output_dir
    remove_leftovers(directory)
    # Checkpoints first: what a kill leaves of a run must not look like one to resume.
    for folder in (directory / CHECKPOINTS, directory / REPLAY):
        if folder.exists():
            discard(folder)
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    write_whole(directory / MANIFEST, seal({"format": FORMAT, "names": [*NAMES]}))
    write_config(config)


def write_config(config: RunConfig) -> None:
    """Save the resolved config: a record, which nothing reads back."""
    write_whole(config.run.output_dir / CONFIG, dump_config(config))


def newest_checkpoint(config: RunConfig, fingerprint: Fingerprint) -> Checkpoint:
    """What a run continues from; RunDirectoryError or CheckpointError where it cannot."""
    directory, steps = config.run.output_dir, config.training.steps
    if not (checkpoints := list_checkpoints(directory / CHECKPOINTS)):
        remedy = "start again with --overwrite, and with training.save_every above 0"
        raise RunDirectoryError(f"{directory} has no complete checkpoint to resume from: {remedy}.")
    accepted = REWARD_FUNCTION if config.reward.accept_changed else None
    checkpoint = load_checkpoint(checkpoints[-1], fingerprint, accepted=accepted)
    if steps < checkpoint.step:
        done = f"the {checkpoint.step} steps that the run in {directory} has done"
        raise RunDirectoryError(f"training.steps: {steps} are fewer than {done}: give as many.")
    for path in sorted((directory / CHECKPOINTS).glob("step_*")):
        step = path.name.removeprefix("step_")
        if step.isdecimal() and int(step) > checkpoint.step:
            problem = "is no whole checkpoint and stands where the run will write one"
            raise RunDirectoryError(f"{path} {problem}: move it away.")
    return checkpoint


def own_file(directory: Path, name: str) -> Path:
    """Where a run writes a file; RunDirectoryError if what stands there is not a run's."""
    file = directory / name
    if file.is_symlink() or (file.exists() and name not in _listed(directory)):
        problem = f"is a link, or a file that no run of ours wrote ({MANIFEST} does not list it)"
        raise RunDirectoryError(f"{file} {problem}: move it away.")
    return file


def _listed(directory: Path) -> list[str]:
    """The names under which the run in `directory` writes; none where there is no run."""
    file = directory / MANIFEST
    if not os.path.lexists(file):
        return []
    try:
        manifest = unseal(file)
    except ValueError as error:
        raise RunDirectoryError(
            f"{error}. It tells what is the run's: restore it, or go on in another run.output_dir "
            "with the newest checkpoint as policy.path."
        ) from error
    if manifest.get("format") != FORMAT:
        raise RunDirectoryError(f"{file} is not of format {FORMAT}; use the version that wrote it.")
    return manifest["names"]


def _require_removable(config: RunConfig) -> None:
    """RunDirectoryError if `open_directory` would remove what no run wrote, or an input."""
    directory = config.run.output_dir
    if found := [str(path.relative_to(directory)) for path in _strangers(directory)]:
        more = "" if len(found) <= 5 else f" and {len(found) - 5} more"
        raise RunDirectoryError(
            f"{', '.join(found[:5])}{more} in {directory}: no run of ours wrote these files or "
            f"links, and --overwrite removes nothing else. Move them away, or {_OTHER}."
        )
    doomed = {(directory / name).resolve() for name in NAMES}
    data = {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    for key, path in {"policy.path": config.policy.path, **data}.items():
        links = [f for f in path.iterdir() if f.is_symlink()] if path and path.is_dir() else []
        for file in [path, *links] if path else []:
            place = Path(os.path.realpath(file))
            if doomed & {place, *place.parents}:
                problem = f"lies inside the run in {directory} that --overwrite would remove"
                raise RunDirectoryError(f"{key} {file} {problem}: {_OTHER}.")


def _strangers(directory: Path) -> Iterator[Path]:
    """What lies under the names of a run but was not written by it; links always."""
    for name in (CHECKPOINTS, REPLAY):
        folder = directory / name
        if folder.is_symlink():
            yield folder
            continue
        for child in sorted(folder.iterdir()) if folder.exists() else []:
            if not is_leftover(child):
                yield from strangers(child) if name == CHECKPOINTS else _beside_a_bundle(child)


def _beside_a_bundle(path: Path) -> list[Path]:
    """What no run wrote of a path in the folder of the replay bundles."""
    bundle = re.fullmatch(r"bundle-[0-9a-f]{16}", path.name) and path.is_dir()
    found = sorted(path.iterdir()) if bundle and not path.is_symlink() else []
    if not found:  # a whole bundle is renamed into its place
        return [path]
    ours = {*FILES_OF_A_BUNDLE, LOCALIZATION, TEXTS}
    strange = [f for f in found if f.name not in ours or f.is_symlink() or not f.is_file()]
    return [f for f in strange if not is_leftover(f)]
