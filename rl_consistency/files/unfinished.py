"""How a run writes: whole or not at all, under random names.

What is being written, and what is being removed, lies in a directory `.rl_consistency-<random>`. It
is made exclusively, so that nothing of the user's can stand there, and renamed in one piece.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

PREFIX = ".rl_consistency-"
_LEFTOVER = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")


@contextmanager
def unfinished(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, for the block to fill and rename; else removed at its end."""
    place = _new_name(parent)
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def replace(file: Path, target: Path) -> None:
    """Rename a file or directory to `target` once all of it is on the disk."""
    flush(*file.rglob("*"), file)
    os.rename(file, target)
    flush(target.parent)


def write_whole(file: Path, text: str) -> None:
    """Replace a file in one piece: a kill leaves the old text or the new."""
    with unfinished(file.parent) as place:
        (place / file.name).write_text(text, encoding="utf-8")
        replace(place / file.name, file)


def discard(directory: Path) -> None:
    """Remove a directory: a kill leaves it whole, or a leftover."""
    gone = _new_name(directory.parent)
    os.rename(directory, gone)
    shutil.rmtree(gone)


def is_leftover(path: Path) -> bool:
    """Whether a kill left it: half written, or half removed."""
    ours = _LEFTOVER.fullmatch(path.name) is not None
    return ours and path.is_dir() and not path.is_symlink()


def remove_leftovers(directory: Path) -> None:
    """Remove what kills left in a directory, and nothing behind a link."""
    if directory.is_symlink():
        return
    for path in filter(is_leftover, directory.glob(PREFIX + "*")):
        shutil.rmtree(path)


def flush(*paths: Path) -> None:
    """Wait until files and directories are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _new_name(parent: Path) -> Path:
    return parent / f"{PREFIX}{uuid4().hex}"
