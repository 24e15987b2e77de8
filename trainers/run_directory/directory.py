"""A run's directory: what may be started or resumed there, and what a new run removes.

`manifest.json` lists what the run has written. Only that is removed or replaced, and only while it
is what was written; anything else is the user's. wandb keeps its own directory, which nothing here
touches.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from weakref import WeakSet

from rl_consistency.numerics.files import discard, is_leftover, remove_leftovers
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.trainers.config.inputs import inputs_of
from rl_consistency.trainers.config.recipe import RunConfig, dump_config
from rl_consistency.trainers.run_directory.checkpoint import (
    REWARD_FUNCTION,
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    remedy,
    strangers,
)
from rl_consistency.trainers.run_directory.manifest import (
    MANIFEST,
    RunDirectoryError,
    State,
    begin_manifest,
    is_written,
    listed,
    strangers_in,
    write_own,
)

LOCK = ".rl_consistency.lock"
CONFIG, REFERENCE = "config.yaml", "reference.safetensors"
METRICS, DIGESTS, SAMPLES = "metrics.jsonl", "digests.jsonl", "samples.jsonl"
CHANGES = "changes.jsonl"
ROWS = (METRICS, DIGESTS, SAMPLES, CHANGES)
FILES = (CONFIG, *ROWS, REFERENCE, "summary.json", "report.html", "drift.png")
CHECKPOINTS, REPLAY = "checkpoints", "replay"
NAMES = (*FILES, CHECKPOINTS, REPLAY)
_OTHER = "choose another directory (run.output_dir)"


def check_directory(
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool = False,
    held: bool = False,
) -> str | None:
    """RunDirectoryError, with its remedy, where the run cannot be started or continued; of a dry
    run, which writes nothing, what the run itself would have to be told. This process may have
    `held` the directory already."""
    directory = config.run.output_dir
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise RunDirectoryError(f"run.output_dir: {there} is not a directory: {_OTHER}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"run.output_dir: nothing can be written into {there}: {_OTHER}.")
    require_kinds(directory)
    known = listed(directory)
    names = [name for name in NAMES if os.path.lexists(directory / name)]
    if known is None and names:
        raise RunDirectoryError(
            f"{directory} holds {', '.join(names)}, which no run of ours wrote: it has no "
            f"{MANIFEST}. Move that away, or {_OTHER}."
        )
    if links := [f for n in (*FILES, MANIFEST, LOCK) if (f := directory / n).is_symlink()]:
        raise RunDirectoryError(f"{links[0]} is a link: put the file in its place, or {_OTHER}.")
    if resume and known is None:
        raise RunDirectoryError(f"{directory} holds no run to resume; leave out resume.")
    if known is not None and not resume:
        remedy = f"continue it (resume), remove it (overwrite), or {_OTHER}."
        if dry_run and not overwrite:
            return f"{directory} holds a run, which a dry run leaves alone. To run: {remedy}"
        if not overwrite:
            raise RunDirectoryError(f"{directory} already holds a run; {remedy}")
    if known is not None:
        with nullcontext() if held else locked(directory):  # a run at work changes its files
            _require_own_files(config, resume=resume)
    return None


def _require_own_files(config: RunConfig, *, resume: bool) -> None:
    """RunDirectoryError, naming it, where a run that is continued or removed would lose what it did
    not write, or an input of the recipe."""
    directory = config.run.output_dir
    known = listed(directory) or {}
    # Resuming reads the reference, and only the newest checkpoint.
    kept = {REFERENCE} if resume else set()
    found = [
        directory / name
        for name in FILES
        if name not in kept and os.path.lexists(directory / name)
        if not is_written(directory / name, known.get(name, []))
    ]
    if found := found if resume else [*found, *_strangers(directory, known)]:
        names = [str(path.relative_to(directory)) for path in found]
        more = "" if len(names) <= 5 else f" and {len(names) - 5} more"
        option = "resume replaces" if resume else "overwrite removes"
        raise RunDirectoryError(
            f"{', '.join(names[:5])}{more} in {directory}: no run of ours wrote these files or "
            f"links, or they were changed since, and {option} nothing else. Move them away, or "
            f"{_OTHER}."
        )
    if not resume:
        require_outside(directory, inputs_of(config.policy, config.data, config.reward))


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


def open_directory(
    config: RunConfig, *, overwrite: bool, commits: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Remove what an earlier run left, and save the config; the directory is locked by now.

    `commits` are those of what was read from the hub, for the manifest.
    """
    directory = config.run.output_dir
    check_directory(config, resume=False, overwrite=overwrite, held=True)
    remove_leftovers(directory)
    # Checkpoints first: what a kill leaves of a run must not look like one to resume.
    for folder in (directory / CHECKPOINTS, directory / REPLAY):
        if folder.exists() and any(folder.iterdir()):  # an empty one may be the user's
            discard(folder)
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    begin_manifest(directory, commits)
    write_config(config)


def write_config(config: RunConfig) -> None:
    """Save the resolved config: a record, which nothing reads back."""
    write_own(config.run.output_dir / CONFIG, dump_config(config))


def newest_checkpoint(
    config: RunConfig, fingerprint: Fingerprint, changeable: Sequence[str] = ()
) -> Checkpoint:
    """What a run continues from, where only `changeable` keys of its recipe may be others;
    RunDirectoryError or CheckpointError where it cannot."""
    directory, steps = config.run.output_dir, config.training.steps
    if not (checkpoints := list_checkpoints(directory / CHECKPOINTS)):
        remedy = "start again with overwrite, and with training.save_every above 0"
        raise RunDirectoryError(f"{directory} has no complete checkpoint to resume from: {remedy}.")
    accepted = REWARD_FUNCTION if config.reward.accept_changed else None
    free = {"accepted": accepted, "changeable": changeable}
    checkpoint = load_checkpoint(checkpoints[-1], fingerprint, **free)
    if steps < checkpoint.step:
        done = f"the {checkpoint.step} steps that the run in {directory} has done"
        raise RunDirectoryError(f"training.steps: {steps} are fewer than {done}: give as many.")
    for path in sorted((directory / CHECKPOINTS).glob("step_*")):
        step = path.name.removeprefix("step_")
        if step.isdecimal() and int(step) > checkpoint.step:
            problem = "is no whole checkpoint and stands where the run will write one"
            raise RunDirectoryError(f"{path} {problem}: move it away.")
    return checkpoint


def require_outside(directory: Path, inputs: Mapping[str, Path]) -> None:
    """RunDirectoryError where `overwrite` would remove an input, which is given by name."""
    doomed = {(directory / name).resolve() for name in NAMES}
    for key, path in inputs.items():
        links = [f for f in path.iterdir() if f.is_symlink()] if path.is_dir() else []
        for file in [path, *links]:
            place = Path(os.path.realpath(file))
            if doomed & {place, *place.parents}:
                problem = f"lies inside the run in {directory} that overwrite would remove"
                raise RunDirectoryError(f"{key} {file} {problem}: copy it elsewhere, or {_OTHER}.")


def _strangers(directory: Path, known: Mapping[str, Sequence[State]]) -> Iterator[Path]:
    """What lies in the folders of a run but was not written by it; links always."""

    def is_listed(path: Path) -> bool:
        return is_written(path, known.get(str(path.relative_to(directory)), []))

    for name in (CHECKPOINTS, REPLAY):
        folder = directory / name
        if folder.is_symlink():
            yield folder
            continue
        for child in sorted(folder.iterdir()) if folder.exists() else []:
            if not is_leftover(child):
                in_replay = name == REPLAY
                yield from strangers_in(child, is_listed) if in_replay else strangers(child)
