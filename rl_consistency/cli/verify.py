"""`rl-consistency verify`: every claim checked on this machine, and the checks by mutants."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from rl_consistency.parity.claims import Result
    from rl_consistency.parity.mutants import MutantResult
    from rl_consistency.parity.verify import Target

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face model directory, in its own dtype"
    )
    model.add_argument(
        "--preset",
        metavar="NAME",
        help="one tiny model: tiny-qwen3, tiny-llama, tiny-qwen2 or tiny-mistral (default: all, "
        "the first over the full sweep)",
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)} (default: the first two)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    parser.add_argument("--quick", action="store_true", help="a smaller sweep")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="instead run the negative controls: every wrong program must turn its checks red",
    )


def run(args: argparse.Namespace) -> int:
    """Verify; 0 when every row is green, 1 when one is red.

    Raises:
        ValueError: an option that cannot be served, or a model that is not covered.
        OSError: no such model directory, or a JSON file that cannot be written.
    """
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise FileNotFoundError(f"--json {args.json}: not a file in an existing directory.")
    _check_device(args.device)
    if args.mutants:
        chosen = [n for n in ("model", "preset", "dtype", "quick") if getattr(args, n)]
        if chosen:
            raise ValueError(
                f"--mutants runs on a model of its own; leave out --{' --'.join(chosen)}."
            )
        return _run_mutants(args.json)
    return _run_claims(_targets(args), args.json)


def _run_claims(targets: Sequence[Target], json_file: Path | None) -> int:
    from rl_consistency.parity.claims import Check
    from rl_consistency.parity.verify import count_checks, run_checks

    console, start = Console(), time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("", total=count_checks(targets))

        def started(check: Check) -> None:
            progress.update(task, description=f"{check.key} ({check.scope})")

        results = run_checks(
            targets, on_start=started, on_result=lambda result: progress.advance(task)
        )
    seconds = time.perf_counter() - start
    for table in claims_tables(results):
        console.print(table)
    failed = [r for r in results if not r.passed]
    for r in failed:
        console.print(f"[red]{r.key}[/] ({r.scope}): {escape(r.detail)}", highlight=False)
    cases = sum(r.cases for r in results)
    console.print(
        f"{len(results) - len(failed)} of {len(results)} checks passed, {cases:,} comparisons on "
        f"{_models(targets)}, {seconds:.0f} s, fingerprint {_fingerprint()['digest'][:12]}",
        highlight=False,
    )
    _write(json_file, {"results": [asdict(r) for r in results]}, not failed, seconds)
    return 1 if failed else 0


def _models(targets: Sequence[Target]) -> str:
    return ", ".join(dict.fromkeys(target.name for target in targets))


def claims_tables(results: Sequence[Result]) -> list[Table]:
    """One table per claim, one row per subject over all models and dtypes it was checked in."""
    from rl_consistency.parity.claims import CLAIMS

    tables = []
    for claim, text in CLAIMS.items():
        own = [r for r in results if r.claim == claim]
        if not own:
            continue
        table = Table(
            title=f"{claim}  {text}",
            title_justify="left",
            title_style="bold",
            show_header=False,
            box=None,
            expand=True,
        )
        table.add_column(width=5, no_wrap=True)
        table.add_column(width=max(len(r.subject) for r in results), no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(width=18)
        table.add_column(width=6, justify="right", no_wrap=True)
        for key in dict.fromkeys(r.key for r in own):
            rows = [r for r in own if r.key == key]
            cases = f"{sum(r.cases for r in rows):,}"
            table.add_row(_verdict(rows), rows[0].subject, _varied(rows), _scopes(rows), cases)
        tables.append(table)
    return tables


def _verdict(rows: Sequence[Result]) -> str:
    return "[green]holds[/]" if all(r.passed for r in rows) else "[red]RED[/]"


def _varied(rows: Sequence[Result]) -> str:
    figures = [r.figure for r in rows if r.figure is not None]
    return rows[0].what + (f": {max(figures):.2f} x stock" if figures else "")


def _scopes(rows: Sequence[Result]) -> str:
    """`model fp32`, `other fp32`, `model bf16`, ... -> `2 models fp32 bf16`."""
    models = dict.fromkeys(r.scope.rpartition(" ")[0] for r in rows)
    dtypes = " ".join(dict.fromkeys(r.scope.rpartition(" ")[2] for r in rows))
    names = " ".join(models) if len(models) == 1 else f"{len(models)} models"
    return f"{names} {dtypes}".strip()


def _run_mutants(json_file: Path | None) -> int:
    from rl_consistency.parity.mutants import MUTANTS, run_controls, run_mutant

    console, start = Console(), time.perf_counter()
    keys = list(dict.fromkeys(key for mutant in MUTANTS for key in mutant.caught_by))
    with _progress(console) as progress:
        task = progress.add_task("the unperturbed program", total=len(MUTANTS) + 2)
        before = run_controls(keys)
        progress.advance(task)
        found = []
        for mutant in MUTANTS:
            progress.update(task, description=mutant.name)
            found.append(run_mutant(mutant))
            progress.advance(task)
        progress.update(task, description="the program put back")
        after = run_controls(keys)
        progress.advance(task)
    seconds = time.perf_counter() - start
    console.print(mutants_table(found))
    red = [r for r in [*before, *after] if not r.passed]
    for r in red:
        console.print(f"[red]red without a mutant[/] {r.key}: {escape(r.detail)}", highlight=False)
    survivors = [m for m in found if not m.killed]
    console.print(
        f"{len(found) - len(survivors)} of {len(found)} mutants caught, {len(keys)} checks green "
        f"before and after: {'no' if red else 'yes'}, {seconds:.0f} s",
        highlight=False,
    )
    content = {
        "mutants": [
            {
                "name": m.mutant.name,
                "what": m.mutant.what,
                "killed": m.killed,
                "survived_checks": list(m.survivors),
                "results": [asdict(r) for r in m.results],
            }
            for m in found
        ],
        "controls": [asdict(r) for r in [*before, *after]],
    }
    passed = not red and not survivors
    _write(json_file, content, passed, seconds)
    return 0 if passed else 1


def mutants_table(found: Sequence[MutantResult]) -> Table:
    """Each wrong program and the checks that noticed."""
    table = Table(title="Negative controls: every check named must turn red")
    for name in ("mutant", "what is wrong", "caught by", "result"):
        table.add_column(name, overflow="fold")
    for m in found:
        checks = "\n".join(
            f"[red]{r.key}: survived[/]" if r.passed else f"{r.key} ({r.mismatches} of {r.cases})"
            for r in m.results
        )
        verdict = "[green]caught[/]" if m.killed else "[red]SURVIVED[/]"
        table.add_row(m.mutant.name, m.mutant.what, checks, verdict)
    return table


def _targets(args: argparse.Namespace) -> list[Target]:
    from rl_consistency.parity.sweep import FULL, QUICK
    from rl_consistency.parity.verify import default_targets, directory_targets, preset_targets

    dtypes = [] if args.dtype is None else [_dtype(args.dtype)]
    sweep = QUICK if args.quick else FULL
    if args.model is not None:
        return directory_targets(args.model, dtypes, sweep)
    if args.preset is not None:
        return preset_targets(args.preset, dtypes, sweep)
    return default_targets(dtypes, quick=args.quick)


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise ValueError(
            f"--dtype {name!r}: canonical orders exist for {', '.join(DTYPES)}; fp8 has none."
        )
    return getattr(torch, name)


def _check_device(name: str) -> None:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is no device; use cpu.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no CUDA device is available here; use --device cpu.")
    if device.type != "cpu":
        raise ValueError(
            f"--device {name}: the canonical orders have no schedule for {device.type} yet; use "
            "--device cpu."
        )


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )


def _fingerprint() -> dict[str, Any]:
    from rl_consistency.numerics.fingerprint import fingerprint

    found = fingerprint()
    return {"digest": found.digest, "entries": found.entries}


def _write(file: Path | None, content: dict[str, Any], passed: bool, seconds: float) -> None:
    if file is None:
        return
    record = {"passed": passed, "seconds": seconds, "fingerprint": _fingerprint(), **content}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
