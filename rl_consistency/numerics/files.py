"""Files that are there whole or not at all, and JSON that holds its own SHA-256.

What is being written, and what is being removed, lies in a directory `.rl_consistency-<random>`. It
is made exclusively, so that nothing of the user's can stand there, and renamed in one piece.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

PREFIX = ".rl_consistency-"


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


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace a file in one piece: a kill leaves the old content or the new. A link goes."""
    with unfinished(file.parent) as place:
        data = content.encode() if isinstance(content, str) else content
        (place / file.name).write_bytes(data)
        replace(place / file.name, file)


def discard(directory: Path) -> None:
    """Remove a directory: a kill leaves it whole, or a leftover."""
    gone = _new_name(directory.parent)
    os.rename(directory, gone)
    shutil.rmtree(gone)


def _new_name(parent: Path) -> Path:
    return parent / f"{PREFIX}{uuid4().hex}"


def is_leftover(path: Path) -> bool:
    """Whether a kill left it: half written, or half removed."""
    ours = re.fullmatch(re.escape(PREFIX) + "[0-9a-f]{32}", path.name)
    return ours is not None and path.is_dir() and not path.is_symlink()


def remove_leftovers(directory: Path) -> None:
    """Remove what kills left in a directory, and nothing behind a link."""
    if not directory.is_symlink():
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


def seal(content: Mapping[str, Any]) -> str:
    """The text of `content` and, first in it, the SHA-256 of all the rest."""
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({"sha256": digest, **content}, indent=1)


def unseal(file: Path) -> dict[str, Any]:
    """What was sealed; ValueError, which says how, if one byte of the file is another one now."""
    if not file.is_file():
        raise ValueError(f"{file} is missing or no regular file")
    try:
        text = file.read_bytes().decode("utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.pop("sha256", None), str):
        raise ValueError(
            f"{file} does not hold its own SHA-256: it is damaged, or an older rl_consistency "
            "wrote it"
        )
    if seal(content) != text:
        raise ValueError(f"{file} is damaged: its content does not have the SHA-256 it holds")
    return content


def file_digest(file: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
