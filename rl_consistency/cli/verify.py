"""`rl-consistency verify`: every claim checked on this machine, and the checks by mutants."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_consistency.cli import world
from rl_consistency.cli.console import live_progress, report_mutants
from rl_consistency.numerics.files import require_writable, write_output

if TYPE_CHECKING:
    import torch

    from rl_consistency.verify.claims import Result
    from rl_consistency.verify.mutants.run import MutantResult
    from rl_consistency.verify.targets import Target

TARGETS = ("model", "preset", "quick", "full", "only", "processes")
"""Options that choose what the claims are checked on."""
DTYPES = ("float32", "bfloat16", "float16")
MOST_PROCESSES = 12
"""Most processes on a GPU by default."""
PROCESS_BYTES = 6 * 2**30
"""Bytes of a GPU's memory for each process by default: its context and some tensors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    model = parser.add_mutually_exclusive_group()
    text = "a Hugging Face model directory, in its own dtype"
    model.add_argument("--model", type=Path, metavar="DIR", help=text)
    text = (
        "models built on the spot: tiny-qwen3, tiny-llama, tiny-qwen2, tiny-mistral, "
        "tiny-qwen3-moe, tiny-olmoe, tiny-mixtral; on a GPU also qwen3-0.6b, qwen3-1.7b, qwen3-8b, "
        "llama3-8b, qwen2.5-0.5b, qwen2.5-1.5b, llama3.2-1b, llama3.2-3b with random weights; or "
        "all (default: the tiny ones, on a GPU qwen3-0.6b as well)"
    )
    model.add_argument("--preset", metavar="NAME", nargs="+", action="extend", help=text)
    text = f"{', '.join(DTYPES)} (default: the first two, on a GPU all)"
    parser.add_argument("--dtype", metavar="DTYPE", nargs="+", action="extend", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    extent = parser.add_mutually_exclusive_group()
    text = "a smaller sweep, and two layers of a model of real shape (default on a GPU)"
    extent.add_argument("--quick", action="store_true", help=text)
    text = "the whole sweep, and all layers (default on a CPU)"
    extent.add_argument("--full", action="store_true", help=text)
    text = (
        f"that share the checks (default: 1; on a GPU one per core and {PROCESS_BYTES >> 30} GiB "
        f"of free memory, at most {MOST_PROCESSES})"
    )
    parser.add_argument("--processes", type=int, metavar="N", help=text)
    text = "instead run the negative controls: every wrong program must turn its checks red"
    parser.add_argument("--mutants", action="store_true", help=text)
    text = "only the checks of these ops or models, by part of a name"
    parser.add_argument("--only", metavar="NAME", nargs="+", action="extend", help=text)
    world.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Verify; 0 when every row is green, 1 when one is red."""
    from rl_consistency.trainers.launch import refuse_many_processes

    refuse_many_processes()
    if args.json is not None:
        require_writable("--json", args.json)
    device = chosen_device(args.device)
    start = time.perf_counter()
    if args.world is None:
        _refuse(args, world.OPTIONS, "only --world takes them")
    if args.mutants:
        others = world.OPTIONS if args.world is not None else ()
        _refuse(args, ("dtype", *TARGETS, *others), "--mutants runs on a model of its own")
    if args.world is not None:
        _refuse(args, TARGETS, "--world runs on a model of its own")
        passed, content = world.run(args, device)
    elif args.mutants:
        passed, content = _run_mutants(device)
    else:
        given = _targets(args, device), device, _processes(args, device), args.only or ()
        passed, content = _run_claims(*given)
        content["only"] = list(args.only or ())
    if args.json is not None:
        record = {"passed": passed, "seconds": time.perf_counter() - start}
        from rl_consistency.numerics.fingerprint import fingerprint

        found = fingerprint(device)
        record["fingerprint"] = {"digest": found.digest, "entries": found.entries}
        record["machine"] = _machine(device)
        write_output(args.json, json.dumps(record | content, indent=1) + "\n")
    return 0 if passed else 1


def _refuse(args: argparse.Namespace, options: Sequence[str], why: str) -> None:
    # None, or a flag's False, was not given; a 0 was.
    chosen = [name for name in options if not any(getattr(args, name) is x for x in (None, False))]
    if chosen:
        names = " --".join(chosen).replace("_", "-")
        raise ValueError(f"{why}; leave out --{names}.")


def _processes(args: argparse.Namespace, device: torch.device) -> int:
    import torch

    if args.processes is not None:
        if args.processes < 1:
            raise ValueError(f"--processes {args.processes}: at least 1 is needed.")
        return args.processes
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(len(os.sched_getaffinity(0)), free // PROCESS_BYTES, MOST_PROCESSES))


def _run_claims(
    targets: Sequence[Target], device: torch.device, processes: int, only: Sequence[str]
) -> tuple[bool, dict[str, Any]]:
    from rl_consistency.numerics.fingerprint import fingerprint
    from rl_consistency.verify.run import run_checks

    console, start = Console(), time.perf_counter()
    with live_progress(console) as progress:
        task = progress.add_task(f"in {processes} processes", total=None)

        def finished(result: Result) -> None:
            progress.update(task, advance=1, description=f"{result.key} ({result.scope})")
            _log(console, result)

        results = run_checks(targets, only=only, processes=processes, on_result=finished)
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
    return not failed, {"results": [asdict(r) for r in results]}


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
    from rl_consistency.verify.claims import CLAIMS

    tables = []
    for claim, text in CLAIMS.items():
        own = [r for r in results if r.claim == claim]
        if not own:
            continue
        table = Table(show_header=False, box=None, expand=True, title_justify="left")
        table.title = f"[bold]{claim}  {text}"
        table.add_column(width=5, no_wrap=True)
        table.add_column(width=max(len(r.subject) for r in results), no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(width=18)
        table.add_column(width=6, justify="right", no_wrap=True)
        for key in dict.fromkeys(r.key for r in own):
            rows = [r for r in own if r.key == key]
            verdict = "[green]holds[/]" if all(r.passed for r in rows) else "[red]RED[/]"
            figures = [r.figure for r in rows if r.figure is not None]
            varied = rows[0].what + (f": {max(figures):.2f} x stock" if figures else "")
            cases = f"{sum(r.cases for r in rows):,}"
            # `model fp32`, `other fp32`, `model bf16`, ... -> `2 models fp32 bf16`.
            scopes = [r.scope.rpartition(" ") for r in rows]
            models, dtypes = ([*dict.fromkeys(scope[i] for scope in scopes)] for i in (0, 2))
            names = models[0] if len(models) == 1 else f"{len(models)} models"
            where = f"{names} {' '.join(dtypes)}".strip()
            table.add_row(verdict, rows[0].subject, varied, where, cases)
        tables.append(table)
    return tables


def _run_mutants(device: torch.device) -> tuple[bool, dict[str, Any]]:
    from rl_consistency.verify.mutants.run import mutants_on, run_controls, run_mutant

    console, start = Console(), time.perf_counter()
    mutants = mutants_on(device)
    keys = list(dict.fromkeys(key for mutant in mutants for key in mutant.keys(device)))
    found: list[MutantResult] = []
    with live_progress(console) as progress:
        task = progress.add_task("the unperturbed program", total=len(mutants) + 2)
        controls = run_controls(keys, device)
        for mutant in mutants:
            progress.update(task, advance=1, description=mutant.name)
            found.append(run_mutant(mutant, device))
            for result in found[-1].results:
                _log(console, result, mutant.name)
        progress.update(task, advance=1, description="the program put back")
        controls += run_controls(keys, device)
    return report_mutants(console, found, controls, time.perf_counter() - start)


def _targets(args: argparse.Namespace, device: torch.device) -> list[Target]:
    import torch

    from rl_consistency.verify.presets import PRESETS, known_presets
    from rl_consistency.verify.targets import default_targets, directory_targets, preset_targets

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
    import torch

    from rl_consistency.kernels.core.operand import require_device

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is no device; use cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no CUDA device is available here; use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"--device {name}: the canonical orders have no schedule for {device.type}; use "
            "--device cpu or cuda."
        )
    if device.type == "cuda":
        # Not the device's own index: torch keeps 8 bits of it, and 256 would be 0.
        index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            raise ValueError(f"--device {name}: CUDA devices here: {count}; use an index below it.")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        require_device("verify", torch.empty(0, device=device))
    return device


def _machine(device: torch.device) -> dict[str, Any]:
    """What the results were found on."""
    import torch
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,  # pyright: ignore[reportAttributeAccessIssue]
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
