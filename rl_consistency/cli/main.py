"""The `rl-consistency` command: one subcommand per file, loaded when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import rl_consistency

COMMANDS = {
    "train": "run a recipe: rollouts, GRPO steps, and the drift of every one of them",
    "verify": "check every claim by bytes, op by op and on whole models",
    "report": "render the HTML page of a run directory",
}
"""Subcommand -> help. All but `report` are `add_arguments` and `run` of `cli.<name>`."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses besides 0: a claim does not hold, the caller's mistake, Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        The exit status: 0, 1 when a consistency claim fails, 2 on bad input, 130 on an interrupt.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = _parser(arguments).parse_args(arguments)
        return args.run(args)
    except rl_consistency.ConsistencyError as error:
        return _fail(error, FAILED)
    except (ValueError, TypeError, OSError) as error:
        return _fail(error, BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


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
            subparser.set_defaults(run=_configure(name, subparser))
    return parser


def _configure(name: str, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Load one subcommand: add its arguments, return what runs it."""
    if name == "report":
        parser.add_argument("run_dir", help="directory that `rl-consistency train` wrote")
        return _report
    module = import_module(f"rl_consistency.cli.{name}")
    module.add_arguments(parser)
    return module.run


def _report(args: argparse.Namespace) -> int:
    from rl_consistency.cli.report import render

    print(render(args.run_dir))
    return 0


def _fail(error: object, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status
