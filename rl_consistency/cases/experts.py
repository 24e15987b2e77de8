"""Cases of the router and the experts, and launches of the experts' products and folds.

The host does not know a call's routing, so no pick can depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.cases.case import MANY, Case, Op, Setting, seeds, weight_scale
from rl_consistency.cases.launches import Launch, tuned
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core.device import has_tma, sm_count
from rl_consistency.kernels.experts import schedules
from rl_consistency.kernels.experts.fold_triton import describes_rows, find_runs, fold_runs
from rl_consistency.kernels.experts.op import experts, experts_reference
from rl_consistency.kernels.experts.pairs_triton import expert_pairs_op
from rl_consistency.kernels.experts.products_triton import MOST_STEPS, gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.route import route_reference, route_with_logits
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.pointwise.glu import glu

EXPERTS, TOP_K, INNER = 12, 3, 48

SEQUENCE = 1024
"""Tokens of a sequence whose gradient is timed."""


def router_cases(setting: Setting) -> Iterator[Case]:
    """The choice of some experts, and the weights of all: stock rounds its logits, and may choose
    others among fewer."""
    hidden = setting.shapes.hidden_size

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        x = setting.drawn((rows, hidden), seed, 0.1)
        return x, setting.drawn((EXPERTS, hidden), seed + 1, weight_scale(hidden))

    def chosen_dys(rows: int, seed: int) -> tuple[Tensor, ...]:
        return tuple(setting.wide((rows, n), seed + i, 0.02) for i, n in ((2, TOP_K), (3, EXPERTS)))

    def exact(x: Tensor, weight: Tensor, normalize: bool) -> tuple[Tensor, ...]:
        found = route_reference(x, weight, TOP_K, normalize=normalize)
        return *found, x @ weight.t()

    names = {"rows": ("x",), "shared": ("weight",), "gradients": ("x", "weight")}
    case = partial(Case, op="router", **names, draw=draw, filler={"x": 1.0})
    for size, normalize in (("normalized", True), ("plain", False)):
        yield case(
            size=size,
            outputs=("ids", "weights", "logits"),
            draw_dys=chosen_dys,
            call=partial(route_with_logits, top_k=TOP_K, normalize=normalize),
            reference=partial(exact, normalize=normalize),
        )

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).softmax(-1, dtype=torch.float32).to(x.dtype)

    def of_all(x: Tensor, weight: Tensor, **buffers: Any) -> Tensor:
        return route_with_logits(x, weight, EXPERTS, normalize=False, **buffers)[1]

    yield case(
        size=f"{hidden} x {EXPERTS}",
        outputs=("weights",),
        draw_dys=lambda rows, seed: (setting.drawn((rows, EXPERTS), seed + 2, 0.02),),
        call=of_all,
        stock=stock,
        reference=lambda x, weight: (x @ weight.t()).softmax(-1),
        seeds=seeds(MANY),
    )


def experts_cases(setting: Setting) -> Iterator[Case]:
    """Experts of one sequence; stock is transformers' loop over them, for the same choice."""
    hidden = setting.shapes.hidden_size

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        # Gate times up grows with the square of x, and fp16 ends at 65504.
        x = setting.drawn((rows, hidden), seed, 0.005 if setting.dtype == torch.float16 else 0.1)
        gate = setting.drawn((EXPERTS, hidden), seed + 1, weight_scale(hidden))
        ids, weights, _ = route_with_logits(x, gate, TOP_K, normalize=True)
        gate_up = setting.drawn((EXPERTS, 2 * INNER, hidden), seed + 2, weight_scale(hidden))
        down = setting.drawn((EXPERTS, hidden, INNER), seed + 3, weight_scale(INNER))
        return x, ids, weights.detach(), gate_up, down

    def ours(x: Tensor, ids: Tensor, weights: Tensor, *both: Tensor, **buffers: Any) -> Tensor:
        gate_up, down = both
        layout = PackedSequences.of([0], [len(x)])
        return experts(x, ids, weights, gate_up, down, layout, activation="silu", **buffers)

    def stock(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(len(gate_up)):
            rows, place = torch.where(ids == expert)
            gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
            own = F.linear(F.silu(gate) * up, down[expert]) * weights[rows, place, None]
            total = total.index_add(0, rows, own.to(x.dtype))
        return total

    yield Case(
        op="experts",
        size=f"{hidden} x {INNER}, {TOP_K} of {EXPERTS}",
        rows=("x", "ids", "weights"),
        shared=("gate_up", "down"),
        gradients=("x", "weights", "gate_up", "down"),
        draw=draw,
        draw_dys=lambda rows, seed: (setting.drawn((rows, hidden), seed + 5, 0.02),),
        call=ours,
        stock=stock,
        reference=experts_reference,
        seeds=(4,),
        forward_ways={"by linear and glu, ids upward": by_expert},
        cuts=False,
    )


def by_expert(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The sum of each row's experts, in fp32 from the lowest id on, rounded once."""
    y = torch.zeros_like(x, dtype=torch.float32)
    begun = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    for expert in range(len(down)):
        chosen = ids == expert
        gate, up = linear(x, gate_up[expert]).chunk(2, dim=1)
        weight = weights.where(chosen, 0.0).sum(1, keepdim=True)
        part = weight * linear(glu(gate, up, "silu"), down[expert]).float()
        here = chosen.any(1, keepdim=True)
        y = torch.where(here, torch.where(begun, y + part, part), y)
        begun |= here
    return y.to(x.dtype)


@dataclass(frozen=True, eq=False)
class Routing:
    """Rows of a call at their experts; rows that no sequence owns are filler."""

    ids: Tensor
    """[rows, top_k] int32, ascending in a row."""
    starts: Sequence[int]
    """Rows at which sequences begin."""
    lengths: Sequence[int]
    experts: int

    @property
    def layout(self) -> PackedSequences:
        return PackedSequences.of(self.starts, self.lengths)

    @property
    def count(self) -> int:
        """Pairs that there are; what stands behind them is not written."""
        return self.ids.shape[1] * sum(self.lengths)

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs, places and each expert's first pair; see `expert_pairs_op`."""
        tables = self.layout.tables(self.ids.device)
        return expert_pairs_op(self.ids, tables.query_start, tables.tokens, self.experts)


def even(rows: int, top_k: int, experts: int, device: torch.device, length: int = 0) -> Routing:
    """Each row's experts drawn alike, in sequences of a `length`, or of all rows: the same at each
    call."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=-1)[:, :top_k]
    starts = range(0, rows, length or rows)
    lengths = [min(length or rows, rows - start) for start in starts]
    return Routing(ids.sort(dim=-1).values.to(device, torch.int32), starts, lengths, experts)


def expert_product(
    setting: Setting, product: schedules.Product, rows: int, top_k: int, experts: int, n: int,
    k: int, activation: str = "silu", *, by_row: bool = False, recorded: bool = False,
    routing: Routing | None = None,
) -> Launch:  # fmt: skip
    """`product` of `rows` rows, each at `top_k` experts, with weights of n columns; see `Product`.

    `by_row`: the operand has a row for each row of the call, not one for each pair. `recorded`:
    gate and up are a result too. Of no `routing` it is even.
    """
    fused, pairs = product == "gate_up", rows * top_k
    by_row = by_row or fused
    weight = {"gate_up": (2 * n, k), "nt": (n, k), "nn": (k, n)}[product]
    layout = "nn" if product == "nn" else "nt"
    count = pairs if routing is None else routing.count
    device, dtype = setting.device, setting.dtype

    def operands() -> tuple[Tensor, ...]:
        # The output of a gate goes with the square of `a` and must fit fp16.
        a = setting.drawn((rows if by_row else pairs, k), 0, 0.005 if fused else 0.1)
        weights = setting.drawn((experts, *weight), 1, weight_scale(k))
        found, _, first = (routing or even(rows, top_k, experts, device)).pairs()
        return a, weights, first, found

    def run(
        schedule: Any, a: Tensor, weights: Tensor, first: Tensor, found: Tensor, records: bool
    ) -> tuple[Tensor, ...]:
        if not fused:
            y = product_fwd(a, weights, layout, first, found, top_k, by_row, schedule)
            return (y[:count],)
        y, both = gate_up_fwd(a, weights, first, found, top_k, activation, records, schedule)
        return (y[:count], both[:count]) if records else (y[:count],)

    own = partial(run, records=recorded)
    ways: dict[str, Op] = {"as picked": partial(own, None)}
    if fused and not recorded:
        ways["recorded"] = lambda *operands: run(None, *operands, records=True)[:1]
    tma = has_tma(device) and (product != "nn" or k % MOST_STEPS == 0)
    sizes = pairs, experts, n, k
    return tuned(
        f"experts {product}", own, schedules.product_candidates(product, dtype, tma=tma),
        schedules.pick_product(product, *sizes, dtype, tma),
        shape={"rows": rows, "k_of": f"{top_k}/{experts}", "n": n, "k": k},
        operands=operands,
        ways=ways,
        entry=schedules.product_work(product, dtype, tma, *sizes),
        moved=(pairs * (k + n) + min(pairs, experts) * weight[0] * weight[1]) * dtype.itemsize,
        products=pairs * weight[0] * weight[1],
    )  # fmt: skip


def expert_fold(
    setting: Setting, rows: int, top_k: int, experts: int, n: int, k: int, *,
    dy_by_row: bool = False, fresh: bool = True, routing: Routing | None = None,
) -> Launch:  # fmt: skip
    """The gradients [experts, n, k] over `rows` tokens of sequences of `SEQUENCE`, or of a
    `routing`, from zero; not `fresh` continues them."""
    pairs, device, dtype = rows * top_k, setting.device, setting.dtype

    def operands() -> tuple[Tensor, ...]:
        counts = (rows, pairs) if dy_by_row else (pairs, rows)
        dy, x = setting.drawn((counts[0], n), 0), setting.drawn((counts[1], k), 1)
        own = routing or even(rows, top_k, experts, device, SEQUENCE)
        runs = find_runs(own.ids, own.pairs()[1], own.layout, experts)
        # What a fresh gradient holds does not count.
        before = torch.full((experts, n, k), torch.nan, device=device)
        before = before if fresh else setting.wide((experts, n, k), 2)
        return dy, x, *runs, before.to(accumulator_dtype(x))

    def run(schedule: Any, dy: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
        *runs, gradient = rest
        fold_runs(gradient, dy, x, *runs, dy_by_row=dy_by_row, fresh=fresh, schedule=schedule)
        return gradient

    sizes, tma = (pairs, experts, n, k), describes_rows(device, dtype, n, k)
    return tuned(
        "experts fold", run, schedules.fold_candidates(dtype, tma=tma),
        schedules.pick_fold(*sizes, dtype, tma=tma, processors=sm_count(device)),
        shape={"rows": rows, "k_of": f"{top_k}/{experts}", "n": n, "k": k},
        operands=operands,
        ways={"as picked": partial(run, None)},
        entry=schedules.fold_work(dtype, tma, *sizes),
        moved=pairs * (n + k) * dtype.itemsize + experts * n * k * 4,
        products=pairs * n * k,
    )  # fmt: skip
