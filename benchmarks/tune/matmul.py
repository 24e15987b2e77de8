"""Time every schedule of the matmul order on the bench's shapes, and write the table of winners.

`python -m benchmarks.tune.matmul --seconds 500 --json tune.json [--rows 1,16] [--layouts nt,nn]`
measures what the file does not have yet and stops when the time is spent; call it again to go on.
`python -m benchmarks.tune.matmul --json tune.json --write` then rewrites kernels/matmul/table.py.

Calls run in a CUDA graph; up to 512 rows over rotated weights, so that none is found in L2.
Every candidate's bytes are compared with the first one's; a difference ends the program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.shapes import ROWS, WEIGHTS
from rl_consistency.kernels.matmul.cublaslt import library_product
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import DECODE, LARGE, MEDIUM, Schedule
from rl_consistency.numerics.settings import numeric_settings

TABLE = Path(__file__).resolve().parents[2] / "kernels" / "matmul" / "table.py"
COLD_ROWS = 512
"""The most rows that are timed with cold weights."""

ROTATED_BYTES = 300_000_000
"""Weights that a graph walks through; several times the 50 MB of L2."""

LIBRARY_MARGIN = 0.98
"""The library is preferred where it takes less than this share of the best schedule's time."""

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """One product: `n` columns and `k` elements summed, whichever way the weight lies."""

    layout: str
    m: int
    n: int
    k: int

    @property
    def key(self) -> str:
        """Name in the results file."""
        return f"{self.layout}/m{self.m}/n{self.n}/k{self.k}"

    def operands(self, count: int) -> tuple[Tensor, list[Tensor]]:
        """a [m, k] with outlier columns, and `count` weights."""
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (self.n, self.k) if self.layout == "nt" else (self.k, self.n)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        a = normal(self.m, self.k)
        a[:, ::37] *= 30
        first = normal(*shape)
        return a, [first, *(first.clone() for _ in range(count - 1))]


def problems(rows: list[int], layouts: list[str]) -> Iterator[Problem]:
    """Every shape of the bench: y = x W^T, and dx = dy W."""
    for m in rows:
        for layout in layouts:
            for shape in WEIGHTS:
                n, k = (shape.n, shape.k) if layout == "nt" else (shape.k, shape.n)
                yield Problem(layout, m, n, k)


def candidates(m: int) -> list[Schedule]:
    """Schedules worth timing for a number of rows."""
    if m <= 64:
        chosen = [s for s in DECODE if s.block_m <= max(16, m)]
        return chosen + ([s for s in MEDIUM if s.block_m == 64] if m > 16 else [])
    if m <= 1024:
        return [*(s for s in DECODE if s.block_m == 64 and m <= 512), *MEDIUM, *LARGE]
    return [*LARGE, *(s for s in MEDIUM if s.block_m == 128 and m <= 2048)]


def graph_seconds(product: Product, a: Tensor, weights: list[Tensor]) -> float:
    """Seconds of one call in a CUDA graph over all weights, the median of seven replays."""
    product(a, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(a, weight)
    graph.replay()
    return median(event_seconds(graph.replay) for _ in range(7)) / len(weights)


def event_seconds(call: Callable[[], Any]) -> float:
    """Seconds on the device of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def default_settings() -> None:
    """What torch starts with: the library chooses, and may split K."""
    torch.backends.cuda.preferred_blas_library("default")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True


def measure(problem: Problem, deadline: float) -> dict[str, Any] | None:
    """Microseconds by schedule name, `cublas` and `cublaslt`; None when the time ran out."""
    cold = problem.m <= COLD_ROWS
    count = max(1, min(64, ROTATED_BYTES // (problem.n * problem.k * 2))) if cold else 1
    a, weights = problem.operands(count)
    if not cold:
        # About 10 ms of work, so that a graph's launch does not count.
        weights *= max(1, min(16, int(5e12 / (2 * problem.m * problem.n * problem.k))))
    row: dict[str, Any] = {}

    def stock(a: Tensor, b: Tensor) -> Tensor:
        return library_product(a, b, None, problem.layout, torch.bfloat16)

    default_settings()
    row["cublas"] = graph_seconds(stock, a, weights) * 1e6
    reference: Tensor | None = None
    for schedule in candidates(problem.m):
        if perf_counter() > deadline:
            return None

        def ours(a: Tensor, b: Tensor, schedule: Schedule = schedule) -> Tensor:
            return matmul_fwd(a, b, None, problem.layout, torch.bfloat16, schedule)

        y = ours(a, weights[0])
        reference = y if reference is None else reference
        if not torch.equal(y.view(torch.int16), reference.view(torch.int16)):
            raise SystemExit(f"{problem.key}: {schedule.name} gives other bytes; not a schedule")
        row[schedule.name] = graph_seconds(ours, a, weights) * 1e6
    assert reference is not None
    with numeric_settings():
        library = stock(a, weights[0])
        row["cublaslt"] = graph_seconds(stock, a, weights) * 1e6
    row["cublaslt_differing"] = int(
        (library.view(torch.int16) != reference.view(torch.int16)).sum()
    )
    return row


def best(row: dict[str, Any]) -> tuple[str, bool]:
    """The fastest schedule, and whether the library is to be preferred to it."""
    ours = {name: time for name, time in row.items() if not name.startswith("cublas")}
    name = min(ours, key=lambda n: ours[n])
    library = row["cublaslt_differing"] == 0 and row["cublaslt"] < ours[name] * LIBRARY_MARGIN
    return name, library


def table_source(results: dict[str, dict[str, Any]], meta: dict[str, str]) -> str:
    """kernels/matmul/table.py."""
    lines = []
    for (layout, m, n, k), row in sorted(
        ((_sizes(key), row) for key, row in results.items()), key=lambda item: item[0]
    ):
        name, library = best(row)
        lines.append(f'    ("{layout}", {m}, {n}, {k}, "{name}", {library}),')
    where = ", ".join(f"{name} {value}" for name, value in sorted(meta.items()))
    return (
        '"""Measured winners of the matmul order\'s schedules; written by '
        "`benchmarks/tune/matmul.py`.\n\n"
        "Rows: (layout, rows, n, k, schedule, whether the vendor library was faster still).\n"
        f'Measured on: {where}.\n"""\n\n'
        "MEASURED: tuple[tuple[str, int, int, int, str, bool], ...] = (\n"
        + "\n".join(lines)
        + "\n)\n"
    )


def _sizes(key: str) -> tuple[str, int, int, int]:
    layout, m, n, k = key.split("/")
    return layout, int(m[1:]), int(n[1:]), int(k[1:])


def main(arguments: list[str]) -> int:
    """Measure or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--layouts", default="nt,nn")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    content: dict[str, Any] = {"meta": {}, "results": {}}
    if options.json.exists():
        content = json.loads(options.json.read_text("utf-8"))
    results = content["results"]
    if options.write:
        TABLE.write_text(table_source(results, content["meta"]), "utf-8")
        return 0
    deadline = perf_counter() + options.seconds
    content["meta"] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    rows = [int(m) for m in options.rows.split(",")]
    open_problems = [p for p in problems(rows, options.layouts.split(",")) if p.key not in results]
    for number, problem in enumerate(open_problems, 1):
        row = measure(problem, deadline)
        if row is None:
            print(f"time is spent; {len(open_problems) - number + 1} problems are left")
            break
        results[problem.key] = row
        options.json.write_text(json.dumps(content, indent=1), "utf-8")
        name, library = best(row)
        ours = row["cublaslt"] if library else row[name]
        print(
            f"{number}/{len(open_problems)} {problem.key}: {name} {row[name]:.1f} us, "
            f"cublas {row['cublas']:.1f}, cublaslt {row['cublaslt']:.1f} "
            f"({row['cublaslt_differing']} differ), ratio {row['cublas'] / ours:.3f}",
            flush=True,
        )
    print(table_source(results, content["meta"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
