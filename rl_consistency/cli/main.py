"""The `rl-consistency` command: one subcommand per file, loaded when it is asked for."""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import rl_consistency

COMMANDS = {
    "train": "run a recipe: rollouts, GRPO steps, and the drift of every one of them",
    "verify": "check every claim by bytes, op by op and on whole models",
    "report": "render the HTML page of a run directory",
}
"""Subcommand -> help; its `add_arguments` and `run` stand in `cli.<name>`."""


OUTPUTS = (1, 2)
"""Standard output and error, as descriptors."""
CLOSED_PIPE = 141
"""A shell reports this of a command that wrote to a pipe without a reader."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; `arguments` None takes those of the process.

    Returns the exit status: 0 done, 1 a claim failed, 2 bad input, 3 an error of ours (with its
    traceback), 130 an interrupt, 141 (and no message) where the output's reader has left.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            args = _parser(arguments).parse_args(arguments)
            return _run(args)
        finally:
            # A closed pipe shows here, not in a message of the interpreter at its end.
            print(end="", flush=True)
    except (BrokenPipeError, SystemExit) as error:
        if not _reader_left(error):
            raise
        for descriptor in filter(_is_broken, OUTPUTS):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return CLOSED_PIPE
    except OSError as error:  # of the flush: the disk behind the output is full, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), OUTPUTS[0])
        return _fail(f"standard output cannot be written to: {error.strerror}", 2)


def _run(args: argparse.Namespace) -> int:
    try:
        return args.run(args)
    except BaseException as error:
        if not _reader_left(error):
            return _status(error)
        raise


def _status(error: BaseException) -> int:
    """The exit status of a command that raised this, and its message: all meanings stand here."""
    if isinstance(error, rl_consistency.ConsistencyError):
        return _fail(error, 1)
    if isinstance(error, ValueError | TypeError | OSError):
        return _fail(error, 2)
    if isinstance(error, KeyboardInterrupt):
        return _fail("interrupted", 130)
    # An exit too: a command returns its status, so this one is of code that it called.
    traceback.print_exception(error)
    return _fail("this is a mistake of rl-consistency; please report the lines above", 3)


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


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl-consistency",
        description="On-policy consistency for RL on language models: rollout and training compute "
        "the same bits.",
    )
    version = f"%(prog)s {rl_consistency.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for name, help_text in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_text, description=help_text)
        if name == chosen:
            module = import_module(f"rl_consistency.cli.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def _fail(error: object, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status
