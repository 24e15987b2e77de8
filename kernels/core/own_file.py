"""Files of this user's alone, which processes share: read, locked, and replaced whole.

What others could have written is not read. Neither a link nor a pipe is opened: that could lead
elsewhere, or wait.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 26
"""The largest file that is read; one of a thousand works has 200 KB."""

PART = ".part."
"""Stands in the name of a file that is being written."""

UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a file of any content and owner raises."""


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
