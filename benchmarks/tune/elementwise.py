"""Times every schedule of RMSNorm, rotary, the gated activations and embedding gradients.

`python -m benchmarks.tune.elementwise [--seconds N] [--only NAME,...] [--json FILE]` prints, for
each op and shape, eager torch and each schedule: microseconds, the fraction of a device copy's
bandwidth, and eager time / our time; then the tables for `rms_norm_schedules` and the best `pick`
of the others. Operands rotate through more memory than the L2 cache holds; calls run in CUDA
graphs. Stops, with what it has, when the seconds are used up.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from rl_consistency.kernels.glu import activation_triton as glu_triton
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.gradient_fold.rows_triton import CANDIDATES as ROW_CANDIDATES
from rl_consistency.kernels.gradient_fold.rows_triton import RANKED_TOKENS, launch_rows
from rl_consistency.kernels.rms_norm.backward_triton import rms_norm_bwd
from rl_consistency.kernels.rms_norm.forward_triton import rms_norm_fwd
from rl_consistency.kernels.rms_norm.schedules import (
    NARROW,
    candidates,
    is_narrow,
    pick_backward,
    pick_forward,
)
from rl_consistency.kernels.rotary import rotation_triton as rotary_triton

DTYPE = torch.bfloat16
COLD_BYTES = 256 * 2**20
"""Operands rotate through at least this much memory."""
GRAPH_SECONDS = 2e-3
"""Work of one CUDA graph, about."""
REPLAYS = 7

NORM_SHAPES = ((8192, 4096), (16384, 4096), (8192, 1024), (16384, 1024), (16384, 2048))
HEAD_SHAPES = ((16384, 16, 128), (16384, 8, 128))
ROTARY_SHAPES = ((16384, 16, 8, 128), (8192, 32, 8, 128))
GLU_SHAPES = ((16384, 3072), (8192, 14336))
ROW_SHAPES = ((8192, 4096), (16384, 1024))
VOCABULARY = 151936

Call = Callable[..., Any]
Operands = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Work:
    """One op in one direction at one shape."""

    name: str
    shape: tuple[int, ...]
    moved: int
    """Bytes that have to be read and written."""
    operands: Callable[[], tuple[Tensor, ...]]
    stock: Call
    stock_before: Call | None
    """What has to be taken off the stock time: the forward pass before a backward."""
    default: Any
    schedules: list[Any]
    ours: Callable[[Any], Call]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", default="", help="parts of op names, separated by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here; the schedules are timed on one.")
    deadline = perf_counter() + options.seconds
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}", flush=True)
    wanted = [part for part in options.only.split(",") if part]
    rows: list[dict[str, Any]] = []
    works = [w for w in all_work() if not wanted or any(part in w.name for part in wanted)]
    # Every op's own choice first, so that a short run has a row of each.
    for schedules_too in (False, True):
        for work in works:
            if perf_counter() < deadline:
                rows += measured(work, bandwidth, deadline, schedules_too)
    best = report_best(rows)
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth}
        options.json.write_text(json.dumps(record | {"rows": rows, "best": best}, indent=1) + "\n")


def measured(
    work: Work, bandwidth: float, deadline: float, schedules_too: bool
) -> Iterator[dict[str, Any]]:
    """Rows of one op: eager torch and its default schedule, or all its other schedules."""
    sets = rotated(work.operands)
    stock = 0.0
    if not schedules_too:
        stock = seconds(work.stock, sets)
        if work.stock_before is not None:
            stock -= seconds(work.stock_before, sets)
    chosen = [s for s in work.schedules if s != work.default] if schedules_too else [work.default]
    for schedule in chosen:
        if perf_counter() > deadline:
            return
        try:
            time = seconds(work.ours(schedule), sets)
        except OutOfResources as error:
            print(f"  {work.name} {schedule}: {error}", flush=True)
            continue
        fraction = work.moved / time / bandwidth
        row = {
            "op": work.name,
            "shape": work.shape,
            "schedule": asdict(schedule),
            "default": schedule == work.default,
            "us": time * 1e6,
            "copy_fraction": fraction,
        }
        text = f"{work.name:22} {work.shape!s:22} {time * 1e6:8.1f} us {fraction:5.2f} of copy"
        if stock:
            row |= {"stock_us": stock * 1e6, "ratio": stock / time}
            text += f"  eager {stock * 1e6:8.1f} us, {stock / time:5.2f} x"
        print(f"{text}  {short(schedule)}", flush=True)
        yield row


def report_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest schedule of every op and shape, printed beside the default."""
    best = []
    for key in dict.fromkeys((row["op"], tuple(row["shape"])) for row in rows):
        same = [row for row in rows if (row["op"], tuple(row["shape"])) == key]
        first = min(same, key=lambda row: row["us"])
        default = next((row["us"] for row in same if row["default"]), math.nan)
        print(
            f"best {key[0]:22} {key[1]!s:22} {first['us']:8.1f} us "
            f"{first['copy_fraction']:5.2f} of copy (default {default:8.1f} us) "
            f"{first['schedule']}"
        )
        best.append(first)
    return best


def all_work() -> list[Work]:
    """Every op, both directions, at every shape."""
    works: list[Work] = []
    for rows, width in NORM_SHAPES:
        works += norm_work("rms_norm", (rows, width), 1, residual=False)
        works += norm_work("add_rms_norm", (rows, width), 1, residual=True)
    for tokens, heads, width in HEAD_SHAPES:
        works += norm_work("qk_norm", (tokens, heads, width), heads, residual=False)
    for shape in ROTARY_SHAPES:
        works += rotary_work(*shape)
    for shape in GLU_SHAPES:
        works += glu_work(shape)
    return works + [row_work(*shape) for shape in ROW_SHAPES]


def norm_work(name: str, shape: tuple[int, ...], heads: int, *, residual: bool) -> list[Work]:
    """RMSNorm of one shape; with the residual addition in front."""
    n, width = math.prod(shape), shape[-1]
    row_bytes = n // width * 4

    def operands() -> tuple[Tensor, ...]:
        x, other, dy = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(3))
        weight = torch.rand(width, dtype=DTYPE, device="cuda") + 0.5
        return x, other, dy, weight, torch.rand(n // width, device="cuda")

    def eager(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = other + x if residual else x
        wide = total.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        y = weight * wide.to(DTYPE)
        return (y, total) if residual else (y,)

    def eager_both(x: Tensor, other: Tensor, dy: Tensor, weight: Tensor, _: Tensor) -> None:
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        outputs = eager(leaves[0], other, leaves[1])
        # The sum's own gradient arrives as another tensor, as it does in a model.
        torch.autograd.grad(outputs, leaves, (dy, other)[: len(outputs)])

    def forward(schedule: Any) -> Call:
        return lambda x, other, dy, weight, rstd: rms_norm_fwd(
            x, other if residual else None, weight, 1e-6, schedule
        )

    def backward(schedule: Any) -> Call:
        schedule = None if schedule is NARROW else schedule

        def call(x: Tensor, other: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> None:
            dtotal = other if residual else None
            _, sums = rms_norm_bwd(dy, dtotal, x, weight, rstd, heads, True, schedule)
            folded_step_sums(sums, DTYPE)

        return call

    tensors = (4, 4) if residual else (2, 3)
    eager_forward = lambda x, other, dy, weight, rstd: eager(x, other, weight)  # noqa: E731
    return [
        Work(
            f"{name} fwd",
            shape,
            tensors[0] * n * DTYPE.itemsize + row_bytes,
            operands,
            eager_forward,
            None,
            pick_forward(width),
            candidates(width),
            forward,
        ),
        Work(
            f"{name} bwd",
            shape,
            tensors[1] * n * DTYPE.itemsize + row_bytes,
            operands,
            eager_both,
            eager_forward,
            NARROW if is_narrow(width, heads) else pick_backward(width, heads),
            candidates(width, heads),
            backward,
        ),
    ]


def rotary_work(tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[Work]:
    """Rotation of queries and keys; the backward is the same kernel with the sine negated."""
    n = tokens * (heads + kv_heads) * head_dim

    def operands() -> tuple[Tensor, ...]:
        q = torch.randn(tokens, heads, head_dim, dtype=DTYPE, device="cuda")
        k = torch.randn(tokens, kv_heads, head_dim, dtype=DTYPE, device="cuda")
        return q, k, *torch.rand(2, tokens, head_dim // 2, device="cuda")

    def eager_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat([t, t], dim=-1).to(DTYPE)[:, None] for t in (cos, sin))
        return eager_one(q, cos, sin), eager_one(k, cos, sin)

    def eager_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        torch.autograd.grad(eager(*leaves, cos, sin), leaves, (q, k))

    def ours(inverse: bool) -> Callable[[Any], Call]:
        return lambda schedule: lambda *rows: rotary_triton.rotary_fwd(*rows, inverse, schedule)

    moved = 2 * n * DTYPE.itemsize + tokens * head_dim * 4
    shape, schedules = (tokens, heads, kv_heads, head_dim), list(rotary_triton.CANDIDATES)
    default = rotary_triton.SCHEDULE
    return [
        Work("rotary fwd", shape, moved, operands, eager, None, default, schedules, ours(False)),
        Work("rotary bwd", shape, moved, operands, eager_both, eager, default, [], ours(True)),
    ]


def glu_work(shape: tuple[int, ...]) -> list[Work]:
    """SwiGLU."""
    n = math.prod(shape)

    def operands() -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(3))

    def eager(gate: Tensor, up: Tensor, dy: Tensor) -> Tensor:
        return F.silu(gate) * up

    def eager_both(gate: Tensor, up: Tensor, dy: Tensor) -> None:
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        torch.autograd.grad(eager(*leaves, dy), leaves, dy)

    def forward(schedule: Any) -> Call:
        return lambda gate, up, dy: glu_triton.glu_fwd(gate, up, "silu", schedule)

    def backward(schedule: Any) -> Call:
        return lambda gate, up, dy: glu_triton.glu_bwd(dy, gate, up, "silu", schedule)

    size, default = n * DTYPE.itemsize, glu_triton.SCHEDULE
    schedules = list(glu_triton.CANDIDATES)
    return [
        Work("glu fwd", shape, 3 * size, operands, eager, None, default, schedules, forward),
        Work("glu bwd", shape, 5 * size, operands, eager_both, eager, default, schedules, backward),
    ]


def row_work(tokens: int, width: int) -> Work:
    """Gradients of embedding rows added to a table, ids as frequent as they are in text."""
    uniform = torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = (VOCABULARY**uniform).long().clamp(max=VOCABULARY - 1)
    table = torch.zeros(VOCABULARY, width, device="cuda")

    def ours(schedule: Any) -> Call:
        ranked = tokens <= RANKED_TOKENS
        return lambda ids, rows: launch_rows(table, ids, rows, schedule, ranked=ranked)

    return Work(
        "embedding bwd",
        (tokens, width),
        tokens * width * DTYPE.itemsize + 8 * width * ids.unique().numel(),
        lambda: (ids.cuda(), torch.randn(tokens, width, dtype=DTYPE, device="cuda")),
        lambda ids, rows: table.index_add_(0, ids, rows.float()),
        None,
        ROW_CANDIDATES[0],
        list(ROW_CANDIDATES),
        ours,
    )


def rotated(make: Callable[[], tuple[Tensor, ...]]) -> Operands:
    """Operand sets that together do not fit the L2 cache."""
    sets = [make()]
    held = sum(t.numel() * t.element_size() for t in sets[0])
    sets += [make() for _ in range(max(COLD_BYTES // held, 1))]
    return sets


def seconds(call: Call, sets: Operands) -> float:
    """Median seconds of one call, operands rotating, in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*sets[0])
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for rows in sets:
            call(*rows)
        ended.record()
    torch.cuda.synchronize()
    once = max(started.elapsed_time(ended) / 1e3, 1e-5)
    rounds = max(int(GRAPH_SECONDS / once), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for rows in sets:
                call(*rows)
    times = []
    for _ in range(REPLAYS):
        started.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(started.elapsed_time(ended) / 1e3)
    return median(times) / (rounds * len(sets))


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device copy of half a gigabyte."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda a, b: b.copy_(a), [(source, target)])


def short(schedule: Any) -> str:
    """A schedule's fields without those that are None."""
    return " ".join(f"{k}={v}" for k, v in asdict(schedule).items() if v is not None)


if __name__ == "__main__":
    main()
