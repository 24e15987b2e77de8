"""A file that a command writes at the end of its work: refused at the start where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from rl_consistency.files.unfinished import PREFIX, unfinished


def require_writable(option: str, file: Path) -> None:
    """OSError, naming option and file, unless `write_whole` could write it; leaves nothing."""
    target = Path(os.path.realpath(file))
    try:
        misplaced = target.is_dir() or not target.parent.is_dir()
        if not misplaced and not _is_stream(file):
            if target.exists():
                target.open("r+b").close()
            NamedTemporaryFile(dir=target.parent, prefix=PREFIX).close()
    except OSError as error:
        reason = f"cannot be written here ({error.strerror}); choose another."
        raise OSError(f"{option} {file}: {reason}") from error
    if misplaced:
        raise FileNotFoundError(f"{option} {file}: not a file in an existing directory.")


def write_whole(file: Path, text: str) -> None:
    """Write a file in one piece: what was there stays until all of the text is written.

    A link is followed; a terminal or a pipe takes the text as it is.
    """
    if _is_stream(file):
        file.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(file))
    with unfinished(target.parent) as place:
        (place / target.name).write_text(text, encoding="utf-8")
        os.replace(place / target.name, target)


def _is_stream(file: Path) -> bool:
    return file.exists() and not file.is_file() and not file.is_dir()
