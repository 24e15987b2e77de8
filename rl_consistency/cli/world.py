"""`rl-consistency verify --world`: the hash table of training.

The same tiny run is trained by several numbers of processes, in every strategy, micro-batch and
dtype, by GRPO and by PPO. All runs of a dtype and an algorithm must end with the same bytes.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_consistency.cli.console import live_progress, report_mutants

if TYPE_CHECKING:
    import torch

    from rl_consistency.verify.world.cells import Cell, Outcome

OPTIONS = ("strategy", "algorithm", "micro_batch", "steps")
DIGITS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this mode of `verify`."""
    group = parser.add_argument_group("training on several processes")
    text = (
        "instead train a tiny run on so many processes each, 1 to 4, on a GPU one per GPU, and "
        "compare the weights (without a value: all that are possible); with --mutants 1,2, and the "
        "weights must differ"
    )
    group.add_argument("--world", metavar="W,...", nargs="?", const="", help=text)
    options: dict[str, Any] = {"nargs": "+", "action": "extend"}
    text = "of training.strategy (default: all)"
    group.add_argument("--strategy", metavar="NAME", help=text, **options)
    text = "grpo or ppo, which trains replicated only (default: both)"
    group.add_argument("--algorithm", metavar="NAME", help=text, **options)
    text = "sequences, 1 to 4 (default: 1 2 4)"
    group.add_argument("--micro-batch", metavar="N", type=int, help=text, **options)
    group.add_argument("--steps", metavar="N", type=int, help="of each run (default: 20)")


def run(args: argparse.Namespace, device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Train every cell; whether there is one hash per dtype and algorithm, and the data."""
    from rl_consistency.verify.world.cells import STEPS, cells_of, failures

    worlds = _worlds(args, device)
    if args.mutants:
        return _run_mutants(worlds, device)
    steps = STEPS if args.steps is None else args.steps
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least 1 is needed.")
    axes = _axes(args)
    cells, start = cells_of(worlds, *axes), time.perf_counter()
    runs = Counter(cell.kind for cell in cells)
    if min(runs.values(), default=0) < 2:
        found = ", ".join(f"{count} of {kind}" for kind, count in runs.items()) or "none"
        raise ValueError(f"runs: {found}; a single one compares nothing; narrow it less.")
    console = Console()
    outcomes = _train(console, cells, steps, device)
    why = {outcome.cell: text for outcome, text in failures(outcomes)}
    missing = _missing(*axes)
    console.print(hash_table(outcomes, why, missing))
    for cell, text in why.items():
        console.print(f"[red]{cell.name}[/]: {escape(text)}", highlight=False)
    for name, text in missing.items():
        console.print(f"[yellow]not run[/] {name}: {text}", highlight=False)
    tokens, wrong = sum(o.tokens for o in outcomes), sum(o.mismatched_tokens for o in outcomes)
    same = "[green]one hash per dtype and algorithm[/]"
    verdict = f"[red]{len(why)} runs differ or failed[/]" if why else same
    text = f"{verdict}: {len(cells)} runs of {steps} steps, "
    text += f"{wrong} of {tokens:,} tokens differ from the rollout's, "
    console.print(f"{text}{time.perf_counter() - start:.0f} s", highlight=False)
    rows = [vars(o.cell) | vars(o) | {"failure": why.get(o.cell, "")} for o in outcomes]
    kept = [{k: v for k, v in row.items() if k not in ("cell", "mutant", "rows")} for row in rows]
    return not why, {"steps": steps, "cells": kept, "not_run": missing}


def hash_table(
    outcomes: Sequence[Outcome], why: Mapping[Cell, str], missing: Mapping[str, str]
) -> Table:
    """The first digits of each run's hash, red where `why` says what is wrong."""
    worlds = sorted({outcome.cell.world_size for outcome in outcomes})
    # 79 columns with four numbers: a terminal's 80 must not cut a hash.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = "SHA-256 of the final parameters, by number of processes"
    for name in ("dtype", "strategy", "micro", *map(str, worlds)):
        table.add_column(name, no_wrap=True)
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for outcome in outcomes:
        cell, shown = outcome.cell, outcome.digest[:DIGITS] or "error"
        row = rows.setdefault((cell.kind, cell.strategy, str(cell.micro_batch)), {})
        row[cell.world_size] = f"[red]{shown}[/]" if cell in why else shown
    for key, row in rows.items():
        table.add_row(*key, *(row[world_size] for world_size in worlds))
    for name in missing:
        strategy, dtype = name.split()
        table.add_row(dtype, strategy, "-", *("[yellow]not run[/]" for _ in worlds))
    return table


def _worlds(args: argparse.Namespace, device: torch.device) -> tuple[int, ...]:
    import torch

    from rl_consistency.verify.world.cells import WORLDS

    cuda = device.type == "cuda"
    if cuda and args.device != "cuda":
        raise ValueError(f"--device {args.device}: each process takes its own GPU; use cuda.")
    most = torch.cuda.device_count() if cuda else WORLDS[-1]
    possible = {str(size): size for size in WORLDS if size <= most}
    default = [*possible][: 2 if args.mutants else None]
    given = dict.fromkeys(args.world.split(",") if args.world else default)
    if refused := [text for text in given if text not in possible]:
        allowed = f"1 to {WORLDS[-1]}"
        if cuda:
            allowed += f", and at most one for each of the {most} GPUs here"
        raise ValueError(f"--world {refused[0]}: numbers of processes split by commas, {allowed}.")
    if args.mutants and ("1" not in given or len(given) < 2):
        raise ValueError("--mutants compares 1 process with several: give --world 1,2 or more.")
    return tuple(possible[text] for text in given)


def _axes(args: argparse.Namespace) -> tuple[list[Any], ...]:
    """Strategies, micro-batches, dtypes and algorithms asked for."""
    from rl_consistency.verify.world import cells

    sizes = range(1, cells.LARGEST_MICRO_BATCH + 1)
    found = []
    for option, asked, default, known in (
        ("strategy", args.strategy, cells.STRATEGIES, cells.STRATEGIES),
        ("micro-batch", args.micro_batch, cells.MICRO_BATCHES, sizes),
        ("dtype", args.dtype, cells.DTYPES, cells.DTYPES),
        ("algorithm", args.algorithm, cells.ALGORITHMS, cells.ALGORITHMS),
    ):
        chosen = list(dict.fromkeys(asked or default))
        if unknown := [name for name in chosen if name not in known]:
            allowed = ", ".join(map(str, known))
            raise ValueError(f"--{option} {unknown[0]}: --world trains {allowed}.")
        found.append(chosen)
    return tuple(found)


def _missing(
    strategies: Sequence[str], _: object, dtypes: Sequence[str], algorithms: Sequence[str]
) -> dict[str, str]:
    """What cannot be trained here, and why."""
    from rl_consistency.verify.world.cells import ALGORITHMS, DTYPES, left_out

    return {
        f"{strategy} {DTYPES[dtype]}": why
        for strategy, dtype in product(strategies, dtypes)
        if any(strategy in ALGORITHMS[name] for name in algorithms)
        if (why := left_out(strategy, dtype))
    }


def _train(
    console: Console, cells: Sequence[Cell], steps: int, device: torch.device
) -> list[Outcome]:
    from rl_consistency.verify.world.processes import run_cells

    with live_progress(console) as progress:
        task = progress.add_task("starting processes", total=len(cells))

        def finished(outcome: Outcome) -> None:
            name, digest = outcome.cell.name, outcome.digest[:DIGITS]
            progress.update(task, advance=1, description=f"{name}: {outcome.failure or digest}")
            if not console.is_terminal:
                print(f"{outcome.failure or digest}  {name}, {outcome.seconds:.1f} s", flush=True)

        return run_cells(cells, steps=steps, device=device.type, on_outcome=finished)


def _run_mutants(worlds: Sequence[int], device: torch.device) -> tuple[bool, dict[str, Any]]:
    from rl_consistency.verify.world.cells import control_cells, judge

    console, start = Console(), time.perf_counter()
    found, controls = judge(_train(console, control_cells(worlds), 1, device))
    return report_mutants(console, found, controls, time.perf_counter() - start)
