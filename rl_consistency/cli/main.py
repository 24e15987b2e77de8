"""The `rl-consistency` command: one subcommand per file, loaded when it runs."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from importlib import import_module
from typing import Any

import rl_consistency
from rl_consistency.cli.arguments import COMMANDS
from rl_consistency.cli.watched import watched

OURS = rl_consistency.__name__
OUTPUTS = (1, 2)
"""Standard output and error, as descriptors."""
CLOSED_PIPE = 141
"""A shell reports this of a command that wrote to a pipe without a reader."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as an interrupt does; a shell reports 128 and their number."""


class OutputError(ValueError):
    """Standard output that cannot be written to: an OSError would be taken for one of a file."""


class Ended(KeyboardInterrupt):
    """One of `ENDINGS` came: what lets an interrupt through lets this through."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; `arguments` None takes those of the process.

    `train` runs other people's code: as a command of its own it is `watched`.

    Returns the exit status: 0 done, 1 a claim failed, 2 bad input, 3 an error of ours (with its
    traceback), 130 an interrupt, 129 and 143 SIGHUP and SIGTERM, 141 (and no message) where the
    output's reader has left.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        if arguments[:1] == ["train"] and "torch" not in sys.modules:
            with watched():
                return _main(arguments)
    return _main(list(arguments))


def _main(arguments: list[str]) -> int:
    output = sys.stdout and _Output(sys.stdout)
    try:
        with redirect_stdout(output), _ended_by_signals():
            try:
                args = _parser().parse_args(arguments)
                return _run(args)
            finally:
                # A closed pipe shows here, not in a message of the interpreter at its end.
                print(end="", flush=True)
    except (BrokenPipeError, SystemExit) as error:
        if not _reader_left(error):
            raise
        _turn_away(*filter(_is_broken, OUTPUTS))
        return CLOSED_PIPE
    except KeyboardInterrupt as error:  # before the command ran
        return _status(error)
    except OutputError as error:
        _turn_away(OUTPUTS[0])
        return _fail(error, 2)


def _run(args: argparse.Namespace) -> int:
    try:
        command = args.command.replace("-", "_")
        return import_module(f"rl_consistency.cli.{command}").run(args)
    except BaseException as error:
        if not isinstance(error, OutputError) and not _reader_left(error):
            return _status(error)
        raise


class _Output:
    """A stream that is standard output: what it cannot encode it escapes, as standard error does,
    and its errors are named."""

    def __init__(self, stream: Any) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self._stream = stream
        self.write, self.flush = _named(stream.write), _named(stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def named(*given: Any) -> Any:
        try:
            return method(*given)
        except BrokenPipeError:
            raise
        except OSError as error:
            text = f"standard output cannot be written to: {error.strerror}"
            raise OutputError(text) from error

    return named


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make an `Ended` of each of `ENDINGS` that would kill this process, and of no other."""
    process = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == process:
            raise Ended(number)
        signal.signal(number, signal.SIG_DFL)  # a process that a reward function forked, say
        signal.raise_signal(number)

    ours = [number for number in ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # Python lets no other thread change that
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _status(error: BaseException) -> int:
    """The exit status of a command that raised this, and its message: all meanings stand here."""
    if isinstance(error, rl_consistency.ConsistencyError):
        return _fail(error, 1)
    if isinstance(error, ValueError | TypeError | OSError):
        return _fail(str(error) or type(error).__name__, 2)
    if isinstance(error, ImportError) and (error.name or OURS).partition(".")[0] != OURS:
        return _fail(f"{error}: install what is needed, pip install --upgrade rl-consistency", 2)
    if isinstance(error, Ended):
        number = signal.Signals(error.args[0])
        return _fail(f"ended by {number.name}", 128 + number)
    if isinstance(error, KeyboardInterrupt):
        return _fail("interrupted", 130)
    # An exit too: a command returns its status, so this one is of code that it called.
    lines = "".join(traceback.format_exception(error))
    text = "this is a mistake of rl-consistency; please report the lines above"
    return _fail(text, 3, before=lines)


def _reader_left(error: BaseException) -> bool:
    """Whether the pipe that broke is our output; other pipes, such as wandb's, break as well."""
    if isinstance(error, SystemExit):  # rich has already turned the output away, and exits
        return isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError) and any(map(_is_broken, OUTPUTS))


def _is_broken(descriptor: int) -> bool:
    """Whether this is a pipe without a reader."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl-consistency",
        description="On-policy consistency for RL on language models: rollout and training compute "
        "the same bits.",
        allow_abbrev=False,
    )
    version = f"%(prog)s {rl_consistency.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        texts: dict[str, Any] = {"help": command.help, "description": command.help}
        command.add_arguments(subparsers.add_parser(name, **texts, allow_abbrev=False))
    return parser


def _turn_away(*descriptors: int) -> None:
    """Let what is still to be written to an output go nowhere."""
    for descriptor in descriptors:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _fail(error: object, status: int, *, before: str = "") -> int:
    try:
        print(f"{before}error: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError:  # stderr is closed or full: the status alone tells
        _turn_away(OUTPUTS[1])
    return status
