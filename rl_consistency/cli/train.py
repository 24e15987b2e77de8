"""`rl-consistency train RECIPE`: run a recipe, then show what it proved."""

from __future__ import annotations

import argparse
import atexit
import gc
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_consistency.cli.console import print_whole, start_up


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run ended and every check passed, 1 when it ended with drift."""
    with uncollected_imports():
        from rl_consistency.cli.plots import save_picture
        from rl_consistency.cli.report import render
        from rl_consistency.trainers.config.recipe import dump_config, find_recipe, load_config
        from rl_consistency.trainers.launch import is_first_process, leave
        from rl_consistency.trainers.run import train
        from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints
        from rl_consistency.trainers.run_directory.directory import CHECKPOINTS, require_outside
        from rl_consistency.trainers.run_directory.step_files import passed

    console = Console(quiet=not is_first_process())
    recipe = find_recipe(args.recipe)
    config = load_config(recipe, args.overrides)
    if args.print_config:
        console.print(dump_config(config), end="", soft_wrap=True, markup=False, highlight=False)
        return 0
    announce = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    directory = config.run.output_dir
    if args.dry_run and args.resume:
        raise ValueError("--dry-run tries the first step of a run: leave out --resume")
    if args.overwrite:
        require_outside(directory, {"the recipe": recipe})

    def finish() -> None:
        save_picture(directory)
        render(directory)

    modes = {"resume": args.resume, "overwrite": args.overwrite, "dry_run": args.dry_run}
    try:
        with start_up(console) as starting:
            told = {"announce": announce, "starting": starting, "finish": finish}
            summary = train(config, **modes, **told)
    except KeyboardInterrupt:
        if saved := list_checkpoints(directory / CHECKPOINTS):
            announce(f"The newest checkpoint is {saved[-1]}. To continue:")
            overrides = [part for override in args.overrides for part in ("--set", override)]
            again = ["rl-consistency", "train", args.recipe, *overrides, "--resume"]
            announce(shlex.join(again))
        raise
    finally:
        leave()
    if args.dry_run:
        return 0
    print_whole(console, summary_table(summary))
    paths = f"picture  {directory / 'drift.png'}\nreport   {directory / 'report.html'}"
    console.print(paths, soft_wrap=True, markup=False)  # whole, to be copied
    return 0 if passed(summary) else 1


def summary_table(summary: dict[str, Any]) -> Table:
    """What a newcomer should see at the end of a run."""
    title = f"{summary['name']}: {summary['steps']} steps in {summary['seconds']:.0f} s"
    caption = None
    if (processes := summary["processes"]) > 1:
        depend = "depend" if summary["weights_depend_on_processes"] else "do not depend"
        caption = f"{processes} processes, {summary['strategy']}"
        caption += f"; the weights {depend} on the number of processes"
    table = Table(title=title, caption=caption)
    table.add_column("", no_wrap=True)
    for side, style in (("rl_consistency", "green"), ("stock Hugging Face", "yellow")):
        table.add_column(side, justify="right", style=style)
    routed = (("tokens that met other experts", "rerouted_tokens", "{:,.0f}"),)
    rows = (
        ("tokens compared", "tokens", "{:,.0f}"),
        ("tokens whose logprob differs", "mismatched_tokens", "{:,.0f}"),
        *(routed if "consistency/rerouted_tokens" in summary else ()),
        ("share of tokens that differ", "mismatch_fraction", "{:.1%}"),
        ("largest |difference|", "logprob_abs_diff/max", "{:.2g}"),
        ("largest ULP distance", "ulp/max", "{:,.0f}"),
        ("smallest first-update ratio", "importance_ratio/min", "{:.9g}"),
        ("largest first-update ratio", "importance_ratio/max", "{:.9g}"),
    )
    for label, name, form in rows:
        values = (summary.get(f"{side}/{name}") for side in ("consistency", "stock"))
        table.add_row(label, *("-" if value is None else form.format(value) for value in values))
    if values := summary.get("consistency/value_check/values"):
        differing = summary["consistency/value_check/mismatched_values"]
        table.add_row("values of the critic that differ", f"{differing:,} of {values:,}", "-")
    checks = summary["consistency/gradient_check/checks"]
    good = summary["consistency/gradient_check/passed"]
    empty = summary.get("consistency/gradient_check/without_gradient")
    found = f"{good} of {checks}" + (f", {empty} had no gradient" if empty else "")
    table.add_row("gradient checks passed", found, "-", end_section=True)
    spans = {"reward": "reward, first to last steps", "eval": "evaluation reward, start to end"}
    for name, label in spans.items():
        first, last = (summary[f"{name}/{end}"] for end in ("first", "last"))
        if first is not None:
            table.add_row(label, f"{first:.3f} -> {last:.3f}", "-")
    return table


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """The first imports of a process: no collection looks at what they make, until its end.

    There the interpreter collects them; nanobind lists in 30 lines what Triton has left.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield  # what else is in memory by now may be garbage one day
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
