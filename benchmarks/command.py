"""`rl-consistency bench`: our schedules against stock and public peers, on a GPU.

Everything that is measured is reported, bars that are missed included. A case that raises becomes a
row with the error, the other cases go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import rl_consistency
from benchmarks.options import add_rollout_arguments, rollout_options
from benchmarks.results_file import BARS, Results, Row, load, save
from rl_consistency.cli.output_file import require_writable, require_writable_directory
from rl_consistency.kernels.core.kernels_hash import kernels_hash

if TYPE_CHECKING:
    from benchmarks.suite import Bench, Case, Suite
    from benchmarks.timing import Machine

CASE_SECONDS, QUICK_CASE_SECONDS = 0.12, 0.06
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "what",
        choices=("ops", "model", "rollout"),
        help="single ops, training steps of whole models, or generation",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="merge the results into a file, suite by suite"
    )
    parser.add_argument("--only", metavar="NAME,...", help="only these suites")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="start no further case after N seconds"
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes of each suite")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots of the ratios")
    parser.add_argument(
        "--commit", metavar="HASH", help="the commit measured, where there is no git checkout"
    )
    add_rollout_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; 0 when every case was measured, 1 when one raised.

    Raises:
        ValueError: no CUDA device, an unknown suite, or a results file of another device.
        OSError: a file or directory that cannot be written.
    """
    _check_paths(args)
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise ValueError(
            f"--seconds {args.seconds}: must be a positive number; leave it out for no limit."
        )
    import torch

    # Reads the library settings of a fresh process, so it is imported before anything sets them.
    from benchmarks.timing import Machine

    suites = _chosen(args)
    if not torch.cuda.is_available():
        raise ValueError(
            "bench measures an NVIDIA GPU (sm_80 or later) and none is available here; what a "
            "CPU does is measured by `python -m benchmarks.speed` in a checkout."
        )
    meta = _meta(args)
    results = Results((), {}) if args.json is None else load(args.json, meta["device"])
    machine = Machine(
        torch.device("cuda", torch.cuda.current_device()),
        QUICK_CASE_SECONDS if args.quick else CASE_SECONDS,
    )
    console = Console()
    deadline = None if args.seconds is None else time.perf_counter() + args.seconds
    machine.deadline = deadline
    session = Session(results, meta, args.json, args.quick, console)
    session.measure(suites, machine, deadline)
    if args.what == "rollout":
        from benchmarks.rollout.table import rollout_table

        names = {suite.name for suite in suites}
        console.print(rollout_table([r for r in session.results.rows if r.suite in names]))
    console.print(bars_table(session.results))
    if args.plot is not None:
        from benchmarks.plot import save_plots

        save_plots(session.results, args.plot)
    # The last line is for programs.
    print(json.dumps({"failed": session.failed, "bars": _last_line(session.results)}))
    return 1 if session.failed else 0


@dataclass
class Session:
    """One run of the command: suites measured one after another into one set of results."""

    results: Results
    meta: dict[str, Any]
    file: Path | None
    quick: bool
    console: Console
    failed: list[str] = field(default_factory=list)
    """Cases that raised."""

    def measure(self, suites: Sequence[Suite], machine: Machine, deadline: float | None) -> None:
        """Measure the suites, saving after each."""
        ceilings = {
            "copy_bandwidth": machine.ceilings.copy_bandwidth,
            "matmul_rate": machine.ceilings.matmul_rate,
        }
        self.console.print(
            f"{self.meta['device']}: copy {ceilings['copy_bandwidth'] / 1e12:.2f} TB/s, "
            f"8192^3 bf16 matmul {ceilings['matmul_rate'] / 1e12:.0f} TFLOP/s",
            highlight=False,
        )
        for suite in suites:
            clocks, started = _clocks(), time.perf_counter()
            rows = list(self._rows(suite, machine, deadline))
            errors = [row for row in rows if row.error is not None]
            record = {
                key: self.meta[key] for key in ("commit", "kernels_sha256", "command", "date")
            } | {
                "ceilings": ceilings,
                "clocks": [clocks, _clocks()],
                "seconds": time.perf_counter() - started,
                "cases": len(suite.cases),
                "errors": len(errors),
                "quick": self.quick,
                "complete": not self.quick and not errors and len(rows) == len(suite.cases),
            }
            self.results = self.results.merged(suite.name, rows, self.meta, record)
            if self.file is not None:
                save(self.file, self.results)
            self.console.print(suite_line(suite.name, rows, record), highlight=False)
            if _device_is_lost(errors):
                raise OSError(f"the GPU no longer answers after: {errors[-1].error}")

    def _rows(self, suite: Suite, machine: Bench, deadline: float | None) -> Iterator[Row]:
        from benchmarks.suite import OutOfTime

        with _progress(self.console) as progress:
            task = progress.add_task(suite.name, total=len(suite.cases))
            for case in suite.cases:
                if deadline is not None and time.perf_counter() > deadline:
                    return
                progress.update(task, description=f"{suite.name}: {case.work} {_text(case.shape)}")
                try:
                    row = measured(suite.name, case, machine)
                except OutOfTime:
                    return
                if row.error is not None:
                    name = f"{suite.name}: {case.work} {_text(case.shape)}"
                    self.failed.append(name)
                    progress.console.print(
                        f"[red]{escape(name)}[/] {escape(row.error)}", highlight=False
                    )
                yield row
                progress.advance(task)
                if _device_is_lost([row]):
                    return


def measured(suite: str, case: Case, machine: Bench) -> Row:
    """One case's row; what the case raised is the row's error. `OutOfTime` passes.

    This is the only place where an error of an op is held: a benchmark of hundreds of shapes
    reports the one that fails and measures the others.
    """
    from triton.errors import TritonError

    fields = {"suite": suite, "work": case.work, "shape": case.shape, "dtype": case.dtype}
    try:
        return Row(**fields, **case.run(machine))
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TritonError,
        TypeError,
        ValueError,
    ) as error:
        return Row(**fields, error=f"{type(error).__name__}: {error}"[:500])


def _device_is_lost(rows: Sequence[Row]) -> bool:
    """Whether an error was one after which every further call fails."""
    lost = ("illegal memory access", "device-side assert", "unspecified launch failure")
    return any(text in (row.error or "") for row in rows for text in lost)


def _chosen(args: argparse.Namespace) -> list[Suite]:
    """The suites to measure.

    Raises:
        ValueError: an unknown suite, or an option that goes with another one.
    """
    given = rollout_options(args)
    if given and args.what != "rollout":
        raise ValueError(f"{given[0]} goes with `bench rollout`, not with `bench {args.what}`.")
    if given and args.only is not None:
        raise ValueError(f"{given[0]} measures a workload of its own; --only has no meaning then.")
    if args.what == "ops":
        from benchmarks.ops.suites import op_suites

        suites = op_suites(quick=args.quick)
    elif args.what == "model":
        from benchmarks.train.step import model_suites

        suites = model_suites(quick=args.quick)
    else:
        from benchmarks.rollout.suites import own_workload, rollout_suites

        own = own_workload(args)
        suites = rollout_suites(quick=args.quick) if own is None else [own]
    if args.only is None:
        return suites
    wanted, known = args.only.split(","), {suite.name: suite for suite in suites}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: `bench {args.what}` has {', '.join(known)}.")
    return [known[name] for name in wanted]


def _check_paths(args: argparse.Namespace) -> None:
    if args.json is not None:
        require_writable("--json", args.json)
    if args.plot is not None:
        require_writable_directory("--plot", args.plot)


def suite_line(name: str, rows: Sequence[Row], record: dict[str, Any]) -> str:
    """One line about a suite: rows, lowest and middle ratio, seconds."""
    figures = sorted(row.ratio for row in rows if row.ratio is not None)
    text = f"{name}: {len(rows)} of {record['cases']} cases, {record['errors']} errors"
    if figures:
        middle = figures[len(figures) // 2]
        text += f", stock/ours lowest {figures[0]:.3f}, median {middle:.3f}"
    return f"{text}, {record['seconds']:.0f} s"


def bars_table(results: Results) -> Table:
    """Every bar that has been measured, and whether it is met."""
    table = Table(title="Bars")
    for name in ("bar", "what", "figure", "target", "result"):
        table.add_column(name, overflow="fold")
    for name, bar in results.bars.items():
        if bar["figure"] is None and not bar["complete"]:
            continue
        figure = "-" if bar["figure"] is None else f"{bar['figure']:.3f}"
        target = f"{'>' if bar['at_least'] else '<'}{'' if BARS[name].strict else '='}"
        verdict = "[green]met[/]" if bar["met"] else "[red]missed[/]"
        if not bar["complete"]:
            verdict = "[yellow]incomplete[/]"
        table.add_row(name, bar["what"], figure, f"{target} {bar['bar']:.2f}", verdict)
    return table


def _last_line(results: Results) -> dict[str, Any]:
    return {
        name: {key: bar[key] for key in ("figure", "bar", "met")}
        for name, bar in results.bars.items()
        if bar["figure"] is not None
    }


def _meta(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers
    import triton

    from benchmarks.peers import installed

    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            **installed(),
        },
        "commit": args.commit or _commit(),
        "kernels_sha256": kernels_hash(),
        "command": "rl-consistency " + shlex.join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    """The checked-out commit, `-dirty` where files differ from it; "unknown" without a checkout."""
    assert rl_consistency.__file__ is not None
    root = Path(rl_consistency.__file__).parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return "unknown"

    def output(*command: str) -> str:
        done = subprocess.run([git, "-C", root, *command], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = output("rev-parse", "HEAD")
    changed = output("status", "--porcelain", "--", "kernels", "rl_consistency", "trainers")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _clocks() -> str | None:
    """Clocks, power and temperature as the driver reports them; None without its tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


def _text(shape: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in shape.items())


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        refresh_per_second=2,  # drawing takes the interpreter from the host's loop
    )
