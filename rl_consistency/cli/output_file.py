"""A file that a command writes at the end of its work: refused at the start where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def require_writable(option: str, file: Path) -> None:
    """Refuse a file that `write_whole` could not write; makes, changes and leaves nothing.

    Raises:
        OSError: names the option, the file and what is wrong with it.
    """
    target = _target(file)
    if target.is_dir() or not target.parent.is_dir():
        raise FileNotFoundError(f"{option} {file}: not a file in an existing directory.")
    if _is_stream(file):
        return
    try:
        if target.exists():
            target.open("r+b").close()
        _try_a_file(target.parent, _unfinished(target).name)
    except OSError as error:
        raise _refusal(option, file, error) from error


def write_whole(file: Path, text: str) -> None:
    """Write a file in one piece: what was there stays until all of the text is written.

    A link is followed; a terminal or a pipe takes the text as it is.

    Raises:
        OSError: the file cannot be written.
    """
    if _is_stream(file):
        file.write_text(text, encoding="utf-8")
        return
    target = _target(file)
    unfinished = _unfinished(target)
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _is_stream(file: Path) -> bool:
    return file.exists() and not file.is_file() and not file.is_dir()


def _target(file: Path) -> Path:
    return Path(os.path.realpath(file))


def _unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _try_a_file(directory: Path, prefix: str) -> None:
    NamedTemporaryFile(dir=directory, prefix=prefix).close()


def _refusal(option: str, path: Path, error: OSError) -> OSError:
    return OSError(f"{option} {path}: cannot be written here ({error.strerror}); choose another.")
