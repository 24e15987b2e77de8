"""`manifest.json`: the files that a run has written into its directory, with length and SHA-256.

A file is the run's while it is what is listed; any other one is the user's. A file is listed before
it is there: until it is known to be, what it was before is listed beside it. So a kill leaves
nothing of the run's that is not listed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl_consistency.numerics.files import (
    file_digest,
    is_leftover,
    replace,
    seal,
    unfinished,
    unseal,
    write_whole,
)

MANIFEST, FORMAT = "manifest.json", 2
_OTHER_RUN = "go on in another run.output_dir with the newest checkpoint as policy.path"

State = dict[str, Any]
"""Length (`bytes`) and `sha256` of a file."""


class RunDirectoryError(ValueError):
    """A run directory that cannot be started in or resumed from."""


def begin_manifest(directory: Path, commits: Mapping[str, str] = MappingProxyType({})) -> None:
    """Nothing is listed yet but the commits of what was read from the hub."""
    begun = {"format": FORMAT, "hub": dict(commits), "files": {}}
    write_whole(directory / MANIFEST, seal(begun))


def listed(directory: Path) -> dict[str, list[State]] | None:
    """What a run lists, by path in its directory: the states of a file, the newest last; None where
    there is no manifest. RunDirectoryError on a damaged one."""
    file = directory / MANIFEST
    if not os.path.lexists(file):
        return None
    try:
        manifest = unseal(file)
    except ValueError as error:
        told = f"{error}. It tells what is the run's: restore it, or {_OTHER_RUN}."
        raise RunDirectoryError(told) from error
    if manifest.get("format") != FORMAT:
        raise RunDirectoryError(
            f"{file} is of another rl_consistency, and does not tell which files are still what "
            f"the run wrote: use the version that wrote it, move the run away, or {_OTHER_RUN}."
        )
    return manifest["files"]


def put_on_list(directory: Path, states: Mapping[str, Sequence[State]]) -> None:
    """List files with these states and no others, and no longer those without any."""
    file = directory / MANIFEST
    if not file.exists():  # a folder of rows, or of checkpoints, that is no run's
        return
    with _held(file):
        files = (listed(directory) or {}) | {name: [*s] for name, s in states.items()}
        files = {name: found for name, found in files.items() if found}
        commits = unseal(file).get("hub", {})
        write_whole(file, seal({"format": FORMAT, "hub": commits, "files": files}))


@contextmanager
def _held(file: Path) -> Iterator[None]:
    """Hold a file that is replaced when it changes: a report may be listed while a run writes."""
    while True:
        with file.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(stream.fileno()), file.stat()):
                yield
                return


def state_of(data: bytes) -> State:
    """The state of a file that holds these bytes."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_own(target: Path, content: str | bytes) -> None:
    """Write a file of a run in one piece; errors of `put_own`."""
    with unfinished(target.parent) as place:
        made = place / target.name
        made.write_bytes(content.encode() if isinstance(content, str) else content)
        put_own(made, target)


def put_own(made: Path, target: Path) -> State:
    """Rename a finished file to `target` in the directory of a run, and list it.

    RunDirectoryError if what stands there is not what the run wrote.
    """
    state = {"bytes": made.stat().st_size, "sha256": file_digest(made)}
    known = listed(target.parent)
    if known is not None:
        require_own(target, known)
        put_on_list(target.parent, {target.name: [*known.get(target.name, []), state]})
    replace(made, target)
    put_on_list(target.parent, {target.name: [state]})
    return state


def require_own(file: Path, known: Mapping[str, Sequence[State]] | None) -> None:
    """RunDirectoryError if a file that a run would replace is not what a run wrote there."""
    if os.path.lexists(file) and not is_written(file, (known or {}).get(file.name, [])):
        raise RunDirectoryError(
            f"{file} is a link, or not what a run of ours wrote (by {MANIFEST}): move it away."
        )


def list_files(directory: Path, folder: Path) -> None:
    """List what has just been written into a folder of the run."""
    files = {f: f.read_bytes() for f in folder.iterdir() if f.is_file()}
    put_on_list(
        directory, {str(f.relative_to(directory)): [state_of(data)] for f, data in files.items()}
    )


def is_written(file: Path, states: Sequence[State]) -> bool:
    """Whether a file has one of these states, or was left by a kill between two of them."""
    if file.is_symlink() or not file.is_file():
        return False
    size = file.stat().st_size
    same = [state["sha256"] for state in states if state["bytes"] == size]
    if same and file_digest(file) in same:
        return True
    return any(
        before["bytes"] < size < after["bytes"] and _is_begun(file, before)
        for before, after in pairwise(states)
    )


def _is_begun(file: Path, before: State) -> bool:
    """Whether rows are followed by the beginning of one, which a kill cut off or a power failure
    left full of zeros."""
    data = file.read_bytes()
    rows, rest = data[: before["bytes"]], data[before["bytes"] :].rstrip(b"\0")
    begins = b'{"step": '
    return (
        state_of(rows) == before
        and b"\n" not in rest
        and rest[: len(begins)] == begins[: len(rest)]
    )


def strangers_in(folder: Path, is_ours: Callable[[Path], bool]) -> list[Path]:
    """What is not ours of all that lies in a folder: files, links, and folders without a file of
    ours; leftovers count for nothing. The folder itself where nothing in it is ours."""
    found = [path for path in sorted(folder.rglob("*")) if not _of_a_leftover(path, folder)]
    ours = {p for p in found if not p.is_symlink() and p.is_file() and is_ours(p)}
    inhabited = set[Path]().union(*(path.parents for path in ours))
    if folder.is_symlink() or folder not in inhabited:
        return [folder]
    return [p for p in found if p.is_symlink() or p not in ours | inhabited]


def _of_a_leftover(path: Path, folder: Path) -> bool:
    return any(is_leftover(p) for p in (path, *path.parents) if folder in p.parents)
