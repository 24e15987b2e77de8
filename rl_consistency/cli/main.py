"""The `rl-consistency` command: one subcommand per file, loaded when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import rl_consistency

COMMANDS = {
    "train": "run a recipe: rollouts, GRPO steps, and the drift of every one of them",
    "verify": "check every claim by bytes, op by op and on whole models",
    "report": "render the HTML page of a run directory",
}
"""Subcommand -> help; its `add_arguments` and `run` stand in `cli.<name>`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; `arguments` None takes those of the process.

    Returns the exit status: 0, 1 when a claim fails, 2 on bad input, 130 on an interrupt.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = _parser(arguments).parse_args(arguments)
        return args.run(args)
    except rl_consistency.ConsistencyError as error:
        return _fail(error, 1)
    except (ValueError, TypeError, OSError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


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
