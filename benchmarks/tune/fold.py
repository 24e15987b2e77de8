"""Times every schedule of `fold_outer` against cuBLAS with fp32 output plus an addition.

Usage: python -m benchmarks.tune.fold [--seconds N] [--shapes T,N,K ...] [--dtype bf16|fp16|fp32]
    [--json FILE]

All schedules of a shape must give the same bytes; the exit status is 1 if one does not. Times are
interleaved medians in one process; gradients rotate through more memory than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from rl_consistency.kernels.core.device import has_tma, sm_count
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer
from rl_consistency.kernels.gradient_fold.schedules import Schedule, candidates, pick

SHAPES = (
    (4096, 4096, 4096),
    (8192, 6144, 4096),
    (16384, 3072, 1024),
    (16384, 1024, 3072),
    (16384, 2048, 2048),
    (16384, 12288, 4096),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROTATED_BYTES = 2**28
STOCK = "cuBLAS fp32 + add"
MIN_ROUNDS = 5


def milliseconds(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def label(schedule: Schedule) -> str:
    tile_n, tile_k = schedule.tile
    return (
        f"{schedule.kind} {tile_n}x{tile_k}x{schedule.block_t} w{schedule.warps} "
        f"s{schedule.stages}{' x2' if schedule.resident > 1 else ''}"
        f"{' persistent' if schedule.persistent else ''}"
    )


class Problem:
    """Operands of one shape and as many gradients as defeat the L2 cache."""

    def __init__(self, tokens: int, n: int, k: int, dtype: torch.dtype):
        self.shape = (tokens, n, k)
        generator = torch.Generator("cuda").manual_seed(0)
        self.dy = torch.randn(tokens, n, device="cuda", generator=generator).to(dtype)
        self.x = torch.randn(tokens, k, device="cuda", generator=generator)
        self.x[:, ::37] *= 30.0
        self.x = self.x.to(dtype)
        self.start = torch.randn(n, k, device="cuda", generator=generator)
        count = -(-ROTATED_BYTES // (4 * n * k))
        self.gradients = cycle([self.start.clone() for _ in range(count)])

    def stock(self) -> None:
        if self.dy.dtype == torch.float32:
            product = torch.mm(self.dy.t(), self.x)
        else:
            product = torch.mm(self.dy.t(), self.x, out_dtype=torch.float32)
        next(self.gradients).add_(product)

    def fold(self, schedule: Schedule) -> None:
        launch_outer(next(self.gradients), self.dy, self.x, False, schedule)

    def result(self, schedule: Schedule) -> Tensor:
        gradient = self.start.clone()
        launch_outer(gradient, self.dy, self.x, False, schedule)
        return gradient


def runnable(problem: Problem) -> tuple[list[Schedule], list[Schedule]]:
    """The schedules that this device has room for, and those whose bytes are not the first's."""
    dtype = problem.dy.dtype
    expected: Tensor | None = None
    fitting, differing = [], []
    for schedule in candidates(dtype, tma=has_tma(problem.dy.device)):
        try:
            got = problem.result(schedule)
        except OutOfResources as error:
            print(f"    {label(schedule)}: {error}")
            continue
        fitting.append(schedule)
        if expected is None:
            expected = got
        elif not torch.equal(got.view(torch.int32), expected.view(torch.int32)):
            share = float((got != expected).float().mean())
            print(f"    {label(schedule)}: DIFFERENT BYTES in {share:.2%} of elements")
            differing.append(schedule)
    return fitting, differing


def measure(problem: Problem, schedules: list[Schedule], deadline: float) -> dict[str, float]:
    """Median milliseconds by label, the stock one included."""
    runs: dict[str, Callable[[], None]] = {STOCK: problem.stock}
    runs |= {label(s): lambda s=s: problem.fold(s) for s in schedules}
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds = 0
    while rounds < MIN_ROUNDS or time.monotonic() < deadline:
        for name, run in runs.items():
            elapsed = milliseconds(run)
            if rounds:  # the first round warms up
                times[name].append(elapsed)
        rounds += 1
        if rounds >= 50:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def report(problem: Problem, times: dict[str, float], picked: Schedule) -> dict[str, object]:
    tokens, n, k = problem.shape
    stock = times[STOCK]
    teraflops = 2e-9 * tokens * n * k
    print(f"T {tokens}  N {n}  K {k}  {problem.dy.dtype}")
    for name, elapsed in sorted(times.items(), key=lambda item: item[1]):
        chosen = "  <- picked" if name == label(picked) else ""
        print(
            f"    {name:40} {elapsed * 1e3:9.1f} us {teraflops / elapsed:7.1f} TFLOP/s"
            f"  ratio {stock / elapsed:.3f}{chosen}"
        )
    best = min((name for name in times if name != STOCK), key=lambda name: times[name])
    return {
        "shape": list(problem.shape),
        "dtype": str(problem.dy.dtype),
        "milliseconds": times,
        "best": best,
        "picked": label(picked),
        "best_ratio": stock / times[best],
        "picked_ratio": stock / times[label(picked)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shapes", nargs="*", default=[",".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = [tuple(int(size) for size in shape.split(",")) for shape in arguments.shapes]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)

    end = time.monotonic() + arguments.seconds
    results, wrong = [], False
    for i, (tokens, n, k) in enumerate(shapes):
        if time.monotonic() > end:
            print(f"out of time before {shapes[i:]}; raise --seconds")
            break
        problem = Problem(tokens, n, k, DTYPES[arguments.dtype])
        schedules, differing = runnable(problem)
        wrong |= bool(differing)
        remaining = end - time.monotonic()
        times = measure(problem, schedules, time.monotonic() + remaining / (len(shapes) - i))
        device = problem.dy.device
        picked = pick(
            tokens, n, k, problem.dy.dtype, tma=has_tma(device), processors=sm_count(device)
        )
        results.append(report(problem, times, picked))
        del problem
    print("\nbest per shape")
    for row in results:
        print(
            f"    {row['shape']!s:22} {row['best']:40} {row['best_ratio']:.3f}"
            f"   picked: {row['picked']} {row['picked_ratio']:.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print("all schedules gave the same bytes" if not wrong else "SCHEDULES DIFFER")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
