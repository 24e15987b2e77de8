"""The experts of rows on a CPU: one expert after another, by the products of `linear`.

Shapes, dtypes, order, invariance: those of `experts`. A pair is a row and one of its experts; pairs
stand by expert, then by sequence, then by position.
Errors: ValueError on ids outside the experts or not ascending, and on sequences that share rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout, CapturedPagedAttention
from rl_consistency.kernels.gradient_fold.op import STEP, fold_outer
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.pointwise.glu import glu, glu_gradients
from rl_consistency.kernels.reduction.sums import tree_sum


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """The pairs of a call."""

    rows: Tensor
    """[P] int64, the row of each pair."""
    slots: Tensor
    """[P] int64, the place of the pair's expert among those of its row."""
    sequences: Tensor
    """[P] int64, the sequence of the row."""
    counts: list[int]
    """Pairs of each expert."""

    def by_expert(self) -> Iterator[tuple[int, slice]]:
        """The experts with pairs, and where these stand."""
        end = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(end, end + count)
            end += count

    def steps(self, pairs: slice) -> Tensor:
        """[steps * 16] int64, an expert's pairs in runs that start a step; -1 for filler."""
        _, lens = torch.unique_consecutive(self.sequences[pairs], return_counts=True)
        filled = -(-lens // STEP) * STEP
        starts = (filled.cumsum(0) - filled) - (lens.cumsum(0) - lens)
        place = torch.arange(pairs.stop - pairs.start) + starts.repeat_interleave(lens)
        steps = torch.full((int(filled.sum()),), -1)
        steps[place] = torch.arange(pairs.start, pairs.stop)
        return steps


def route_rows(expert_ids: Tensor, layout: AttentionLayout, num_experts: int) -> RoutedRows:
    """The pairs of expert_ids [R, k] whose rows the layout's sequences own."""
    starts, lens = layout.query_starts, layout.query_lens
    if isinstance(layout, CapturedPagedAttention):
        starts, lens = layout.numbers.query_start.tolist(), layout.numbers.tokens.tolist()
    owned = [torch.arange(s, s + length) for s, length in zip(starts, lens, strict=True)]
    rows = torch.cat(owned) if owned else torch.zeros(0, dtype=torch.int64)
    sequences = torch.repeat_interleave(torch.tensor(list(lens), dtype=torch.int64))
    if len(rows.unique()) < len(rows):
        raise ValueError("experts: sequences of the layout share rows; a row has one sequence.")
    ids = expert_ids[rows].long()
    outside = (ids < 0) | (ids >= num_experts)
    if bool(outside.any()) or bool((ids[:, 1:] <= ids[:, :-1]).any()):
        raise ValueError(
            f"experts: ids must be ascending in each row, from 0 to {num_experts - 1}; "
            "`route_with_logits` gives such."
        )
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    tokens = order // top_k
    return RoutedRows(rows[tokens], order % top_k, sequences[tokens], counts)


def experts_fwd(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    layout: AttentionLayout,
    activation: str,
    recorded: bool,
) -> tuple[Tensor, Tensor, RoutedRows]:
    """y [R, H]; gate and up of each pair [P, 2I], empty unless `recorded`; the pairs."""
    routed = route_rows(expert_ids, layout, len(gate_up))
    packed = x.new_empty((len(routed.rows) if recorded else 0, gate_up.shape[1]))
    outputs = x.new_empty((len(routed.rows), x.shape[1]))
    for expert, pairs in routed.by_expert():
        own = matmul_nt(x[routed.rows[pairs]], gate_up[expert], out_dtype=x.dtype)
        if recorded:
            packed[pairs] = own
        gate, up = own.chunk(2, dim=-1)
        activated = glu(gate, up, activation)
        outputs[pairs] = matmul_nt(activated, down[expert], out_dtype=x.dtype)
    return combine(outputs, routed, len(x), weights), packed, routed


def experts_bwd(
    dy: Tensor,
    routed: RoutedRows,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    packed: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [R, H], dweights [R, k]; the gradients of gate and up [P, 2I] and the weighted activation
    [P, I] of each pair; from dy [R, H] and what the forward pass kept."""
    dpacked, dx = torch.empty_like(packed), dy.new_empty((len(routed.rows), dy.shape[1]))
    weighted = dy.new_empty((len(routed.rows), down.shape[2]))
    dweights = torch.zeros_like(weights)
    for expert, pairs in routed.by_expert():
        rows, slots = routed.rows[pairs], routed.slots[pairs]
        weight = weights[rows, slots].unsqueeze(-1)
        gate, up = packed[pairs].chunk(2, dim=-1)
        activated = glu(gate, up, activation)
        u = matmul_nn(dy[rows], down[expert], out_dtype=dy.dtype)
        dweights[rows, slots] = tree_sum(u.float() * activated.float())
        weighted[pairs] = (weight * activated.float()).to(dy.dtype)
        own = torch.cat(glu_gradients(weight * u.float(), gate, up, activation), dim=-1)
        dpacked[pairs] = own
        dx[pairs] = matmul_nn(own, gate_up[expert], out_dtype=dy.dtype)
    return combine(dx, routed, len(dy)), dweights, dpacked, weighted


def combine(
    outputs: Tensor, routed: RoutedRows, num_rows: int, weights: Tensor | None = None
) -> Tensor:
    """[R, H]: each row's pairs, times their weights if there are any, added by ascending expert."""
    y = outputs.new_zeros((num_rows, outputs.shape[1]), dtype=torch.float32)
    for slot in range(int(routed.slots.max()) + 1 if len(routed.slots) else 0):
        pairs = (routed.slots == slot).nonzero().flatten()
        rows, part = routed.rows[pairs], outputs[pairs].float()
        if weights is not None:
            part = weights[rows, slot].unsqueeze(-1) * part
        y[rows] = part if slot == 0 else y[rows] + part
    return y.to(outputs.dtype)


def fold(
    buffer: Tensor, dy: Tensor, x: Tensor, routed: RoutedRows, *, dy_by_row: bool, fresh: bool
) -> None:
    """Continue `buffer` [E, N, K] over the runs of dy [*, N] and x [*, K], one of which has a row
    for each row of the call, the other one for each pair; `dy_by_row` says that it is dy.

    An expert without pairs is left as it is; a `fresh` buffer counts as all zero.
    """
    if fresh:
        buffer.zero_()
    dy, x = (dy[routed.rows], x) if dy_by_row else (dy, x[routed.rows])
    dy, x = F.pad(dy, (0, 0, 0, 1)), F.pad(x, (0, 0, 0, 1))
    for expert, pairs in routed.by_expert():
        steps = routed.steps(pairs)
        fold_outer(buffer[expert], dy[steps], x[steps])
