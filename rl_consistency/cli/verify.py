"""`rl-consistency verify`: every claim checked on this machine, and the checks by mutants.

With `--world` it makes the hash table of training: the same tiny run is trained by several numbers
of processes, in every strategy, micro-batch and dtype, by GRPO and by PPO. All runs of a dtype and
an algorithm must end with the same bytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
import triton
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_consistency.cli.arguments import DTYPES, MOST_PROCESSES, PROCESS_BYTES
from rl_consistency.cli.console import compact_table, live_progress, print_whole, report_mutants
from rl_consistency.cli.outputs import outputs
from rl_consistency.kernels.core import operand
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.trainers.launch import refuse_many_processes
from rl_consistency.verify import run as checks
from rl_consistency.verify import world
from rl_consistency.verify.claims import CLAIMS, Result
from rl_consistency.verify.mutants import run as mutants
from rl_consistency.verify.presets import PRESETS, known_presets
from rl_consistency.verify.targets import Target, default_targets, directory_targets, preset_targets
from rl_consistency.verify.world import Cell, Outcome

TARGETS = ("model", "preset", "quick", "full", "only", "processes")
"""Options that choose what the claims are checked on."""
WORLD_OPTIONS = ("strategy", "algorithm", "micro_batch", "steps")
"""Options of training on several processes."""
DIGITS = 12
"""Of a hash in the table."""


def run(args: argparse.Namespace) -> int:
    """Verify; 0 when every row is green, 1 when one is red."""
    refuse_many_processes()
    with outputs(args, "verify", "json") as written:
        device, start = chosen_device(args.device), time.perf_counter()
        passed, content = _checked(args, device)
        if "json" in written:
            record = {"passed": passed, "seconds": time.perf_counter() - start}
            found = fingerprint(device)
            record["fingerprint"] = {"digest": found.digest, "entries": found.entries}
            record["machine"] = _machine(device)
            written["json"](record | content)
    return 0 if passed else 1


def _checked(args: argparse.Namespace, device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Whether all is as it has to be, and the data."""
    if args.world is None:
        _refuse(args, WORLD_OPTIONS, "only --world takes them")
    if args.mutants:
        _refuse(args, ("dtype", *TARGETS, *WORLD_OPTIONS), "--mutants runs on a model of its own")
    if args.world is not None:
        _refuse(args, TARGETS, "--world runs on a model of its own")
        return _run_world(args, device)
    return _run_mutants(device) if args.mutants else _run_claims(args, device)


def _refuse(args: argparse.Namespace, options: Sequence[str], why: str) -> None:
    # None, or a flag's False, was not given; a 0 was.
    chosen = [name for name in options if not any(getattr(args, name) is x for x in (None, False))]
    if chosen:
        names = " --".join(chosen).replace("_", "-")
        raise ValueError(f"{why}; leave out --{names}.")


def _processes(args: argparse.Namespace, device: torch.device) -> int:
    if args.processes is not None and args.processes < 1:
        raise ValueError(f"--processes {args.processes}: at least 1 is needed.")
    if args.processes is not None or device.type != "cuda":
        return args.processes or 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(len(os.sched_getaffinity(0)), free // PROCESS_BYTES, MOST_PROCESSES))


def _run_claims(args: argparse.Namespace, device: torch.device) -> tuple[bool, dict[str, Any]]:
    targets, processes = _targets(args, device), _processes(args, device)
    console, start, only = Console(), time.perf_counter(), args.only or ()
    with live_progress(console) as progress:
        task = progress.add_task(f"in {processes} processes", total=None)

        def finished(result: Result) -> None:
            progress.update(task, advance=1, description=f"{result.key} ({result.scope})")
            _log(console, result)

        results = checks.run_checks(targets, only=only, processes=processes, on_result=finished)
    for table in claims_tables(results):
        console.print(table)
    failed = [r for r in results if not r.passed]
    for r in failed:
        console.print(f"[red]{r.key}[/] ({r.scope}): {escape(r.detail)}", highlight=False)
    models = ", ".join(dict.fromkeys(target.name for target in targets))
    passed, compared = len(results) - len(failed), sum(r.cases for r in results)
    text = f"{passed} of {len(results)} checks passed, {compared:,} comparisons on {models}, "
    text += f"{time.perf_counter() - start:.0f} s, "
    text += f"fingerprint {fingerprint(device).digest[:12]}"
    text += f", only {', '.join(only)}" if only else ""
    console.print(text, highlight=False)
    return not failed, {"results": [asdict(r) for r in results], "only": [*only]}


def _log(console: Console, result: Result, mutant: str = "") -> None:
    """One line per check where there is no live bar to look at."""
    if console.is_terminal:
        return
    verdict, detail = ("green", "") if result.passed else ("RED  ", f": {result.detail}")
    what = f"{mutant}: {result.key}" if mutant else f"{result.key} ({result.scope})"
    spent = f"{result.cases} comparisons, {result.seconds:.1f} s"
    print(f"{verdict} {what}, {spent}{detail}", flush=True)


def claims_tables(results: Sequence[Result]) -> list[Table]:
    """One table per claim, one row per subject over all models and dtypes it was checked in."""
    tables = []
    for claim, text in CLAIMS.items():
        own = [r for r in results if r.claim == claim]
        if not own:
            continue
        title = f"[bold]{claim}  {text}"
        table = Table(show_header=False, box=None, expand=True, title=title, title_justify="left")
        table.add_column(width=5, no_wrap=True)
        table.add_column(width=max(len(r.subject) for r in results), no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(width=18, overflow="fold")
        table.add_column(width=6, justify="right", no_wrap=True)
        for key in dict.fromkeys(r.key for r in own):
            rows = [r for r in own if r.key == key]
            verdict = "[green]holds[/]" if all(r.passed for r in rows) else "[red]RED[/]"
            figures = [r.figure for r in rows if r.figure is not None]
            varied = rows[0].what + (f": {max(figures):.2f} x stock" if figures else "")
            # `model fp32`, `other fp32`, `model bf16`, ... -> `2 models fp32 bf16`.
            scopes = [r.scope.rpartition(" ") for r in rows]
            models, dtypes = ([*dict.fromkeys(scope[i] for scope in scopes)] for i in (0, 2))
            names = models if len(models) == 1 else [f"{len(models)} models"]
            where = " ".join([*names, *dtypes]).strip()
            table.add_row(
                verdict, rows[0].subject, varied, where, f"{sum(r.cases for r in rows):,}"
            )
        tables.append(table)
    return tables


def _run_mutants(device: torch.device) -> tuple[bool, dict[str, Any]]:
    console, start = Console(), time.perf_counter()
    chosen = mutants.mutants_on(device)
    keys = list(dict.fromkeys(key for mutant in chosen for key in mutant.keys(device)))
    found: list[mutants.MutantResult] = []
    with live_progress(console) as progress:
        task = progress.add_task("the unperturbed program", total=len(chosen) + 2)
        controls = mutants.run_controls(keys, device)
        for mutant in chosen:
            progress.update(task, advance=1, description=mutant.name)
            found.append(mutants.run_mutant(mutant, device))
            for result in found[-1].results:
                _log(console, result, mutant.name)
        progress.update(task, advance=1, description="the program put back")
        controls += mutants.run_controls(keys, device)
    return report_mutants(console, found, controls, time.perf_counter() - start)


def _targets(args: argparse.Namespace, device: torch.device) -> list[Target]:
    asked = dict.fromkeys(args.dtype or ())
    if unknown := [name for name in asked if name not in DTYPES]:
        text = f"canonical orders exist for {', '.join(DTYPES)}; fp8 has none."
        raise ValueError(f"--dtype {unknown[0]!r}: {text}")
    dtypes = [getattr(torch, name) for name in asked]
    quick = args.quick or (device.type == "cuda" and not args.full)
    if args.model is not None:
        return directory_targets(args.model, dtypes, device=device, quick=quick)
    if args.preset is None:
        return default_targets(dtypes, device=device, quick=quick)
    everything = known_presets() if device.type == "cuda" else tuple(PRESETS)
    names = [n for name in args.preset for n in (everything if name == "all" else (name,))]
    return [
        target
        for name in dict.fromkeys(names)
        for target in preset_targets(name, dtypes, device=device, quick=quick)
    ]


def chosen_device(name: str) -> torch.device:
    """The device of `--device`; ValueError, with the remedy, for one that cannot be used."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is no device; use cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no CUDA device is available here; use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        why = f"the canonical orders have no schedule for {device.type}"
        raise ValueError(f"--device {name}: {why}; use --device cpu or cuda.")
    if device.type == "cuda":
        # Not the device's own index: torch keeps 8 bits of it, and 256 would be 0.
        index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            raise ValueError(f"--device {name}: CUDA devices here: {count}; use an index below it.")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        operand.require_device("verify", torch.empty(0, device=device))
    return device


def _machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,  # pyright: ignore[reportAttributeAccessIssue]
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _run_world(args: argparse.Namespace, device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Train every cell; whether there is one hash per dtype and algorithm, and the data."""
    worlds = _worlds(args, device)
    if args.mutants:
        return _run_world_mutants(worlds, device)
    steps, axes = world.STEPS if args.steps is None else args.steps, _axes(args)
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least 1 is needed.")
    cells, console, start = world.cells_of(worlds, *axes), Console(), time.perf_counter()
    runs = Counter(cell.kind for cell in cells)
    if min(runs.values(), default=0) < 2:
        found = ", ".join(f"{count} of {kind}" for kind, count in runs.items()) or "none"
        raise ValueError(f"runs: {found}; a single one compares nothing; narrow it less.")
    outcomes = _train(console, cells, steps, device)
    why = {outcome.cell: text for outcome, text in world.failures(outcomes)}
    missing = _missing(*axes)
    print_whole(console, hash_table(outcomes, why, missing))
    for cell, text in why.items():
        console.print(f"[red]{cell.name}[/]: {escape(text)}", highlight=False)
    for name, text in missing.items():
        console.print(f"[yellow]not run[/] {name}: {text}", highlight=False)
    tokens, wrong = sum(o.tokens for o in outcomes), sum(o.mismatched_tokens for o in outcomes)
    text = "[green]one hash per dtype and algorithm[/]"
    text = f"[red]{len(why)} runs differ or failed[/]" if why else text
    text += f": {len(cells)} runs of {steps} steps, {wrong} of {tokens:,} tokens differ from the "
    text += f"rollout's, {time.perf_counter() - start:.0f} s"
    console.print(text, highlight=False)
    rows = [vars(o.cell) | vars(o) | {"failure": why.get(o.cell, "")} for o in outcomes]
    kept = [{k: v for k, v in row.items() if k not in ("cell", "mutant", "rows")} for row in rows]
    return not why, {"steps": steps, "cells": kept, "not_run": missing}


def hash_table(
    outcomes: Sequence[Outcome], why: Mapping[Cell, str], missing: Mapping[str, str]
) -> Table:
    """The first digits of each run's hash, red where `why` says what is wrong."""
    worlds = sorted({outcome.cell.world_size for outcome in outcomes})
    # 79 columns with four numbers: a terminal's 80 must not cut a hash.
    table = compact_table("SHA-256 of the final parameters, by number of processes")
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
    cuda = device.type == "cuda"
    if cuda and args.device != "cuda":
        raise ValueError(f"--device {args.device}: each process takes its own GPU; use cuda.")
    most = torch.cuda.device_count() if cuda else world.WORLDS[-1]
    possible = {str(size): size for size in world.WORLDS if size <= most}
    default = [*possible][: 2 if args.mutants else None]
    given = dict.fromkeys(args.world.split(",") if args.world else default)
    if refused := [text for text in given if text not in possible]:
        gpus = f", and at most one for each of the {most} GPUs here" if cuda else ""
        allowed = f"numbers of processes split by commas, 1 to {world.WORLDS[-1]}{gpus}"
        raise ValueError(f"--world {refused[0]}: {allowed}.")
    if args.mutants and ("1" not in given or len(given) < 2):
        raise ValueError("--mutants compares 1 process with several: give --world 1,2 or more.")
    return tuple(possible[text] for text in given)


def _axes(args: argparse.Namespace) -> tuple[list[Any], ...]:
    sizes, found = range(1, world.LARGEST_MICRO_BATCH + 1), []
    for option, asked, known in (
        ("strategy", args.strategy, world.STRATEGIES),
        ("micro-batch", args.micro_batch or world.MICRO_BATCHES, sizes),
        ("dtype", args.dtype, world.DTYPES),
        ("algorithm", args.algorithm, world.ALGORITHMS),
    ):
        found.append(list(dict.fromkeys(asked or known)))
        if unknown := [name for name in found[-1] if name not in known]:
            allowed = ", ".join(map(str, known))
            raise ValueError(f"--{option} {unknown[0]}: --world trains {allowed}.")
    return tuple(found)


def _missing(
    strategies: Sequence[str], _: object, dtypes: Sequence[str], algorithms: Sequence[str]
) -> dict[str, str]:
    """What cannot be trained here, and why."""
    return {
        f"{strategy} {world.DTYPES[dtype]}": why
        for strategy, dtype in product(strategies, dtypes)
        if any(strategy in world.ALGORITHMS[name] for name in algorithms)
        if (why := world.left_out(strategy, dtype))
    }


def _train(
    console: Console, cells: Sequence[Cell], steps: int, device: torch.device
) -> list[Outcome]:
    with live_progress(console) as progress:
        task = progress.add_task("starting processes", total=len(cells))

        def finished(outcome: Outcome) -> None:
            name, digest = outcome.cell.name, outcome.digest[:DIGITS]
            progress.update(task, advance=1, description=f"{name}: {outcome.failure or digest}")
            if not console.is_terminal:
                print(f"{outcome.failure or digest}  {name}, {outcome.seconds:.1f} s", flush=True)

        return world.run_cells(cells, steps=steps, device=device.type, on_outcome=finished)


def _run_world_mutants(worlds: Sequence[int], device: torch.device) -> tuple[bool, dict[str, Any]]:
    console, start = Console(), time.perf_counter()
    found, controls = world.judge(_train(console, world.control_cells(worlds), 1, device))
    return report_mutants(console, found, controls, time.perf_counter() - start)
