"""`rl-consistency report`: render the page of a run directory."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's argument."""
    parser.add_argument("run_dir", help="directory that `rl-consistency train` wrote")


def run(args: argparse.Namespace) -> int:
    """Render the page and print where it is."""
    from rl_consistency.cli.page.report import render

    print(render(args.run_dir))
    return 0
