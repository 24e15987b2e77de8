"""The files that a command writes under names that its user gives.

A command replaces a file only where it wrote that file and the file has not changed: JSON holds
the command's name and its own SHA-256, a picture the command's name. Any other file is replaced by
`--force` alone, and no file is written into the directory of a run. `-` is standard output; what
people read then goes to standard error.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from rl_consistency.numerics.files import PREFIX, seal, unseal, write_whole
from rl_consistency.trainers.run_directory.directory import is_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STANDARD = "-"
PNG = b"\x89PNG\r\n\x1a\n"
WRITER = "written_by"
"""Key of the command's name in its JSON."""

Outputs = Mapping[str, Callable[[Any], None]]
"""Option -> what takes its content; there is none where the option was not given."""


@contextmanager
def outputs(args: argparse.Namespace, command: str, *options: str) -> Iterator[Outputs]:
    """What takes the content of each option that was given: `json` a mapping, `picture` a figure.

    Refuses before the block what could not be written at its end. OSError, FileNotFoundError or
    ValueError, which name option and file.
    """
    given = {o: file for o in options if (file := getattr(args, o)) is not None}
    if len({os.path.realpath(file) for file in given.values()}) < len(given):
        raise ValueError(f"--{' and --'.join(given)} name one file: give them two.")
    for option, file in given.items():
        _require_output(option, file, command, force=args.force)
    last: dict[str, bytes] = {}

    def writes(option: str, file: str) -> Callable[[Any], None]:
        def write(content: Any) -> None:
            data = _CONTENT[option](content, command)
            if file == STANDARD:
                last[option] = data
                return
            # The file may have come, or changed, while the command was at work.
            _require_output(option, file, command, force=args.force)
            if _is_stream(Path(file)):
                Path(file).write_bytes(data)
            else:
                write_whole(Path(os.path.realpath(file)), data)

        return write

    taken = {option: writes(option, file) for option, file in given.items()}
    if STANDARD not in given.values():
        yield taken
        return
    with redirect_stdout(sys.stderr):
        yield taken
    for data in last.values():
        sys.stdout.flush()
        sys.stdout.buffer.write(data + (b"" if data.startswith(PNG) else b"\n"))


def _json(record: Mapping[str, Any], command: str) -> bytes:
    return seal({WRITER: _writer(command), **record}).encode()


def _picture(figure: Figure, command: str) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=160, metadata={"Software": _writer(command)})
    return stream.getvalue()


_CONTENT: dict[str, Callable[[Any, str], bytes]] = {"json": _json, "picture": _picture}


def _writer(command: str) -> str:
    return f"rl-consistency {command}"


def _require_output(option: str, file: str, command: str, *, force: bool) -> None:
    if file == STANDARD:
        return
    target, shown = Path(os.path.realpath(file)), f"--{option} {file}"
    try:
        misplaced = target.is_dir() or not target.parent.is_dir()
        if not misplaced and not _is_stream(target):
            if target.exists():
                target.open("r+b").close()
            NamedTemporaryFile(dir=target.parent, prefix=PREFIX).close()
    except OSError as error:
        reason = f"cannot be written here ({error.strerror}); choose another."
        raise OSError(f"{shown}: {reason}") from error
    if misplaced:
        raise FileNotFoundError(f"{shown}: not a file in an existing directory.")
    if run := next(filter(is_run, target.parents), None):
        raise ValueError(f"{shown} lies in the run {run}, which only the run writes: name another.")
    if target.is_file() and not force and not _wrote(target, option, command):
        raise ValueError(
            f"{shown}: what stands there was not written by `{_writer(command)}`, or was changed "
            "since; name another file, or give --force to replace it."
        )


def _wrote(file: Path, option: str, command: str) -> bool:
    """Whether the command wrote a file that is unchanged."""
    with file.open("rb") as stream:
        begins = stream.read(1000)
    if option == "picture":
        return begins.startswith(PNG) and f"Software\0{_writer(command)}".encode() in begins
    if not begins.startswith(b'{\n "sha256": '):
        return False  # gigabytes of weights, say
    try:
        return unseal(file).get(WRITER) == _writer(command)
    except ValueError:
        return False


def _is_stream(file: Path) -> bool:
    return file.exists() and not file.is_file() and not file.is_dir()
