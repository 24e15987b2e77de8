"""C1 for a GPU's schedules of router and experts: every entry of a table gives the bytes of every
other and of the one that is picked, whether routing is even or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.case import weight_scale
from rl_consistency.cases.experts import EXPERTS, TOP_K
from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.fold_triton import describes_rows, find_runs, fold_runs
from rl_consistency.kernels.experts.pairs_triton import combine_fwd, expert_pairs_op, pair_bwd
from rl_consistency.kernels.experts.products_triton import described, gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.route import candidates as router_candidates
from rl_consistency.kernels.experts.route import choose_fwd, logits_bwd
from rl_consistency.kernels.experts.schedules import (
    COMBINE,
    block_experts,
    fold_candidates,
    pair_candidates,
    product_candidates,
)
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import rows_of, schedules_alike
from rl_consistency.verify.sweep import OpSetup

HIDDEN, INNER = 640, 448
"""Sizes of the experts, whatever the model. HIDDEN and 2 INNER are multiples of 128, without which
no schedule by descriptor takes weights as [K, N]; both are ragged for the widest tiles."""

SUMMED = 2208
"""Columns of a row's sum: several programs of the narrow schedules, one of the widest."""

ROUTED = 60
"""Experts of the router: ragged, and few enough for every schedule."""

CALLS = {
    1: ([0], [1]),
    4: ([2, 0], [2, 1]),
    17: ([0], [17]),
    300: ([150, 3, 275], [117, 130, 25]),
}
"""Rows of each call, where its sequences begin, and their lengths; the other rows are filler."""


@dataclass(frozen=True, eq=False)
class _Call:
    """Rows at their experts; see `expert_pairs_op`."""

    name: str
    ids: Tensor
    layout: PackedSequences
    pairs: Tensor
    places: Tensor
    first: Tensor

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def count(self) -> int:
        """Pairs that there are; what stands behind them is not written."""
        return TOP_K * sum(self.layout.query_lens)


def check_router_schedules(tally: Tally, setup: OpSetup) -> None:
    """Ids, weights, probabilities and logit gradients: of logits that differ, that are often equal,
    and of which one is far above the others."""
    for rows in CALLS:
        drawn = probe((rows, ROUTED), torch.float32, seed=1, scale=0.25, device=setup.device)
        above = drawn.clone()
        above[:, ROUTED // 2] = 60 + above.amax(dim=1)
        kinds = {"distinct": drawn, "often equal": (drawn / 4).round(), "one expert": above}
        for kind, logits in kinds.items():
            _compare_choice(tally, setup, f"{kind}, {rows} rows, normalized", logits, True)
            _compare_choice(tally, setup, f"{kind}, {rows} rows", logits, False)


def check_expert_schedules(tally: Tally, setup: OpSetup) -> None:
    """Gate, up and their activation; the second product; and a row's sum."""
    gate_up, down = _expert_weights(setup)
    for call in _calls(setup.device):
        _compare_gate_up(tally, setup, call, gate_up)
        _compare_product(tally, setup, call, "y", down, "nt", by_row=False)
        _compare_sums(tally, setup, call)


def check_expert_gradient_schedules(tally: Tally, setup: OpSetup) -> None:
    """Both products, what lies between them, and the gradients of both weights."""
    gate_up, down = _expert_weights(setup)
    for call in _calls(setup.device):
        _compare_product(tally, setup, call, "u", down, "nn", by_row=True)
        _compare_pair_gradients(tally, setup, call)
        _compare_product(tally, setup, call, "dx", gate_up, "nn", by_row=False)
        _compare_folds(tally, setup, call)


def _expert_weights(setup: OpSetup) -> tuple[Tensor, Tensor]:
    """[E, 2I, H] and [E, H, I]."""
    gate_up = setup.drawn((EXPERTS, 2 * INNER, HIDDEN), 1, weight_scale(HIDDEN))
    return gate_up, setup.drawn((EXPERTS, HIDDEN, INNER), 2, weight_scale(INNER))


def _calls(device: torch.device) -> Iterator[_Call]:
    """Each number of rows: at all experts alike, most rows at few experts, and all at the same."""
    generator, each = torch.Generator().manual_seed(0), torch.arange(TOP_K)
    popular = torch.arange(1, EXPERTS + 1) ** 2
    for rows, spans in CALLS.items():
        layout = PackedSequences.of(*spans)
        numbers = layout.tables(device)
        drawn = torch.rand(rows, EXPERTS, generator=generator).log() * popular
        for routing, chosen in (
            ("even", (torch.arange(rows)[:, None] + each) % EXPERTS),
            ("skewed", drawn.topk(TOP_K).indices),
            ("one group", each.expand(rows, TOP_K)),
        ):
            ids = chosen.sort(dim=1).values.to(device, torch.int32)
            found = expert_pairs_op(ids, numbers.query_start, numbers.tokens, EXPERTS)
            yield _Call(f"{routing}, {rows} rows", ids, layout, *found)


def _compare(
    tally: Tally, name: str, entries: Iterable[Any], run: Callable[[Any], Tensor]
) -> Tensor:
    """What all entries give, and a call without one, for which one is picked."""
    whole = schedules_alike(tally, name, entries, run)
    tally.equal(f"{name}, as picked", whole, run(None))
    return whole


def _compare_choice(
    tally: Tally, setup: OpSetup, name: str, logits: Tensor, normalize: bool
) -> None:
    size = len(logits), TOP_K
    dweights = probe(size, torch.float32, seed=2, scale=0.02, device=setup.device)

    def routed(schedule: Any) -> Tensor:
        ids, weights, p = choose_fwd(logits, TOP_K, normalize, schedule)
        kept = None if normalize else p
        given = dweights, ids, weights, kept, ROUTED, setup.dtype
        found = ids, weights, logits_bwd(*given, schedule)
        return rows_of(*found) if kept is None else rows_of(*found, kept)

    _compare(tally, name, router_candidates(block_experts(ROUTED)), routed)


def _compare_gate_up(tally: Tally, setup: OpSetup, call: _Call, weights: Tensor) -> None:
    # The output goes with the square of x and must fit fp16.
    x = setup.drawn((call.rows, HIDDEN), 3, 0.005)
    given = x, weights, call.first, call.pairs, TOP_K, "silu"

    def gated(schedule: Any, recorded: bool) -> Tensor:
        y, both = gate_up_fwd(*given, recorded, schedule)
        return rows_of(y[: call.count], both[: call.count]) if recorded else y[: call.count].float()

    entries = product_candidates("gate_up", setup.dtype, tma=described(weights, "nt"))
    name = f"gate, up, silu, {call.name}"
    whole = _compare(tally, f"{name}, recorded", entries, partial(gated, recorded=True))
    y = _compare(tally, name, entries, partial(gated, recorded=False))
    tally.equal(f"{name}, recorded or not", whole[:, :INNER], y)


def _compare_product(
    tally: Tally, setup: OpSetup, call: _Call, name: str, weights: Tensor, layout: Any, by_row: bool
) -> None:
    inner = weights.shape[2 if layout == "nt" else 1]
    a = setup.drawn((call.rows if by_row else len(call.pairs), inner), 4, 0.1)
    given = a, weights, layout, call.first, call.pairs, TOP_K, by_row

    def product(schedule: Any) -> Tensor:
        return product_fwd(*given, schedule)[: call.count]

    entries = product_candidates(layout, setup.dtype, tma=described(weights, layout))
    _compare(tally, f"{name}, {call.name}", entries, product)


def _compare_sums(tally: Tally, setup: OpSetup, call: _Call) -> None:
    outputs = setup.drawn((len(call.pairs), SUMMED), 5)
    for name, weights in (("sum", None), ("weighted sum", _weights(call))):
        run = partial(combine_fwd, outputs, call.places, weights)
        _compare(tally, f"{name}, {call.name}", COMBINE, run)


def _compare_pair_gradients(tally: Tally, setup: OpSetup, call: _Call) -> None:
    # Where outliers meet, their product must fit fp16.
    packed = setup.drawn((len(call.pairs), 2 * INNER), 6, 0.05)
    u = setup.drawn((len(call.pairs), INNER), 7, 1 / 64)
    given = packed, u, _weights(call), call.first, call.pairs, "silu"
    own = call.pairs[: call.count].long()

    def gradients(schedule: Any) -> Tensor:
        dpacked, weighted, dweights = pair_bwd(*given, schedule)
        of_pairs = dpacked[: call.count], weighted[: call.count], dweights.flatten()[own]
        return rows_of(*of_pairs)

    _compare(tally, f"pair gradients, {call.name}", pair_candidates(INNER), gradients)


def _compare_folds(tally: Tally, setup: OpSetup, call: _Call) -> None:
    """Gradients of both weights, continued and from zero."""
    runs = find_runs(call.ids, call.places, call.layout, EXPERTS)
    rows = setup.drawn((call.rows, HIDDEN), 8)
    for name, width, by_row in (("gate, up", 2 * INNER, False), ("down", INNER, True)):
        of_pairs = setup.drawn((len(call.pairs), width), 9)
        dy, x = (rows, of_pairs) if by_row else (of_pairs, rows)
        shape = EXPERTS, dy.shape[1], x.shape[1]
        start = probe(shape, torch.float32, seed=10, device=setup.device).to(accumulator_dtype(x))
        tma = describes_rows(setup.device, setup.dtype, *shape[1:])
        for fresh in (False, True):
            before = torch.full_like(start, torch.nan) if fresh else start

            def continued(schedule: Any, dy=dy, x=x, by_row=by_row, before=before, fresh=fresh):
                buffer = before.clone()
                fold_runs(buffer, dy, x, *runs, dy_by_row=by_row, fresh=fresh, schedule=schedule)
                return buffer

            case = f"gradient of {name}, {call.name}{', from zero' if fresh else ''}"
            _compare(tally, case, fold_candidates(setup.dtype, tma=tma), continued)


def _weights(call: _Call) -> Tensor:
    """[R, k] fp32 with all their digits."""
    generator = torch.Generator().manual_seed(call.rows)
    return torch.rand(call.rows, TOP_K, generator=generator).to(call.ids.device)
