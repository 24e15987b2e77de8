"""`rl-consistency tune`: the fastest schedules of a policy on this GPU; no bit changes."""

from __future__ import annotations

import argparse
import re

import torch
from rich.console import Console
from rich.markup import escape

from rl_consistency.cases.launches import Launch
from rl_consistency.cli.console import compact_table, live_progress, print_whole
from rl_consistency.cli.verify import chosen_device
from rl_consistency.trainers.launch import refuse_many_processes
from rl_consistency.trainers.policy import read_config
from rl_consistency.tuning import tune as tuning
from rl_consistency.tuning.policy_works import policy_works
from rl_consistency.tuning.tune import Outcome, TuningReport

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0}
SHOWN = 20
"""Works in the table: those with the largest gains in a step."""


def run(args: argparse.Namespace) -> int:
    """Tune; 1 where a candidate gave other bytes than the reference, else 0."""
    refuse_many_processes()
    budget = seconds_of(args.budget)
    config = read_config(args.model)
    device = tunable_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else getattr(config, "dtype", None)
    works = policy_works(config, dtype or torch.float32, device, args.rows)
    console = Console()
    with live_progress(console) as progress:
        task = progress.add_task("", total=len(works))

        def tell(o: Outcome | None, name: str) -> None:
            progress.update(task, advance=int(o is not None), description=name)
            if o is not None and not console.is_terminal:
                found = f"{o.winner}{' (known)' if o.known else ''}"
                found += f"  WITHDRAWN: {', '.join(o.withdrawn)}" if o.withdrawn else ""
                print(f"{name}: {o.default_us:.1f} -> {o.winner_us:.1f} us  {found}", flush=True)

        report = tuning.tune_device(works, device, budget=budget, again=args.again, tell=tell)
    show(console, report, works)
    return 0 if report.passed else 1


def tunable_device(name: str) -> torch.device:
    """The GPU of `--device`; ValueError for a CPU, or where no GPU is."""
    if name != "cpu" and not torch.cuda.is_available():
        text = "no CUDA device is available here, and the CPU has one schedule for each op."
        raise ValueError(f"nothing to tune: {text}")
    device = chosen_device(name)
    tuning.require_tunable(device)
    return device


def seconds_of(text: str) -> float:
    """`60s`, `60` or `1.5m` in seconds; ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if found is None or found[2] not in UNITS or not float(found[1]):
        raise ValueError(f"--budget {text!r}: give a time such as 60s or 2m.")
    return float(found[1]) * UNITS[found[2]]


def show(console: Console, report: TuningReport, works: list[Launch]) -> None:
    """The table of the largest gains, what was withdrawn or left out, and the sum."""
    changed = [outcome for outcome in report.outcomes if outcome.winner != outcome.default]
    # By the share of a step that a winner saves.
    changed.sort(key=lambda o: o.work.seconds * (1 - 1 / o.gain), reverse=True)
    if changed:
        table = compact_table(f"{len(changed)} works with a faster schedule")
        for name in ("work", "default us", "winner us", "gain", "winner"):
            is_figure = "us" in name or name == "gain"
            side = "right" if is_figure else "left"
            table.add_column(name, justify=side, no_wrap=is_figure, overflow="fold")
        for o in changed[:SHOWN]:
            figures = f"{o.default_us:.1f}", f"{o.winner_us:.1f}", f"{o.gain:.2f} x"
            table.add_row(escape(o.work.key), *figures, escape(o.winner))
        print_whole(console, table)
    for name, reason in report.withdrawn.items():
        console.print(f"[red]withdrawn[/] {escape(name)}: {escape(reason)}", highlight=False)
    for reason in dict.fromkeys(report.left_out.values()):
        names = [name for name, why in report.left_out.items() if why == reason]
        text = f"left out {len(names)}, the op's rule stays: {reason}; the first is {names[0]}"
        console.print(escape(text), highlight=False)
    known = sum(outcome.known for outcome in report.outcomes)
    text = f"{len(report.outcomes)} of {len(works)} works, {known} of them known, "
    text += f"{len(changed)} with a faster schedule, {report.seconds:.0f} s; {report.path}"
    console.print(escape(text), highlight=False)
