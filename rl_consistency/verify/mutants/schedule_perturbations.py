"""Ways to make one schedule differ from the others, each put back on exit; see `perturbations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention import forward_triton as attention_triton
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.hopper.backward import attention_hopper_bwd
from rl_consistency.kernels.attention.tiles_triton import BackwardCall
from rl_consistency.kernels.experts import fold_triton, pairs_triton, products_triton, route
from rl_consistency.kernels.experts import schedules as expert_schedules
from rl_consistency.kernels.gradient_fold import outer_triton, rows_triton
from rl_consistency.kernels.gradient_fold import schedules as gradient_fold_schedules
from rl_consistency.kernels.linear import few_rows_triton as linear_triton
from rl_consistency.kernels.linear import schedules as few_rows_schedules
from rl_consistency.kernels.matmul import product_triton as matmul_triton
from rl_consistency.kernels.pointwise import glu, rotary
from rl_consistency.kernels.rms_norm import schedules as rms_norm_schedules
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd, rms_norm_fwd
from rl_consistency.kernels.sampling import support_triton, vocabulary_triton
from rl_consistency.verify.checks.schedules import norm_backward_entries
from rl_consistency.verify.mutants.mutant import mutant
from rl_consistency.verify.mutants.perturbations import blockwise_attention
from rl_consistency.verify.substitution import substituted

Launcher = Callable[..., Any]
Pair = tuple[Launcher, Launcher]
"""A launcher, and what takes its place."""


@mutant(
    "schedule of another order",
    cuda="C1 schedules: matmul; schedules: fused products; schedules: gradient fold; "
    "schedules: attention; schedules: token_logprobs; schedules: glu; schedules: rotary; "
    "schedules: rms_norm; schedules: gradient rows; schedules: sampling",
)
def one_schedule_of_another_order() -> AbstractContextManager[None]:
    """One entry of every schedule table of a dense model splits a sum or rounds it once more."""
    return substituted(*chain.from_iterable(_large_launchers() + _small_launchers()))


@mutant(
    "expert schedule of another order",
    cuda="C1 schedules: router; schedules: experts; schedules: experts backward",
)
def one_expert_schedule_of_another_order() -> AbstractContextManager[None]:
    """One entry of every schedule table of router and experts splits a sum or rounds once more."""
    return substituted(*chain.from_iterable(_expert_launchers()))


def _large_launchers() -> list[Pair]:
    """Products, the fold of their gradients, attention, statistics of the vocabulary."""
    product, outer = matmul_triton.matmul_fwd, outer_triton.launch_outer
    attend = attention_triton.attention_fwd
    statistics = vocabulary_triton.vocabulary_row_statistics
    folds = gradient_fold_schedules.POINTER[0], gradient_fold_schedules.WIDE[0]

    def mutant_product(
        a: Tensor, b: Tensor, bias: Any, layout: str, out_dtype: torch.dtype, schedule: Any = None
    ) -> Tensor:
        if schedule is None or schedule.kind != "pointer" or schedule.block_m != 64:
            return product(a, b, bias, layout, out_dtype, schedule)
        low, high = (
            product(a[:, s], b[:, s] if layout == "nt" else b[s], None, layout, torch.float32)
            for s in _halves(a)
        )
        total = low + high
        return (total if bias is None else total + bias.float()).to(out_dtype)

    def mutant_attend(
        q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, window: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        # The first for operands of 16 bits; fp32 has only low tiles.
        schedule, last = options.get("schedule"), attention_schedules.PREFILL[-1]
        if schedule is not None and (schedule.rows == 64 or schedule == last):
            return blockwise_attention(q, k, v, layout, scale, window)
        return attend(q, k, v, layout, scale, window, **options)

    def mutant_statistics(*args: Any) -> Tensor:
        found = statistics(*args)
        return found.bfloat16().float() if args[3:] == (None, "4x4") else found

    return [
        (product, mutant_product),
        _some_entries(outer, folds, _added_up(outer)),
        (attend, mutant_attend),
        (statistics, mutant_statistics),
    ]


def _small_launchers() -> list[Pair]:
    """Several products in one launch, and ops that treat rows one by one."""
    project: Launcher = linear_triton.qkv_fwd
    rotate, fold = rotary.rotary_fwd, rows_triton.launch_rows
    find, tile = support_triton.vocabulary_support, support_triton.TILE

    def split_k(x: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        *weights, bq, bk, bv, schedule = operands
        low, high = (
            project(x[:, s], *(w[:, s] for w in weights), *biases, schedule)
            for s, biases in zip(_halves(x), ([None] * 3, [bq, bk, bv]), strict=True)
        )
        return tuple(a + b for a, b in zip(low, high, strict=True))

    def unrounded(x: Tensor, w_gate: Tensor, w_up: Tensor, *rest: Any) -> Tensor:
        gate, up = (x.float() @ weight.float().t() for weight in (w_gate, w_up))
        return (F.silu(gate) * up).to(x.dtype)

    def silu_rounded(gate: Tensor, up: Tensor, *rest: Any) -> Tensor:
        return F.silu(gate) * up

    def gradients_rounded(dy: Tensor, gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        sigmoid = torch.sigmoid(gate)
        return dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * (gate * sigmoid)

    def of_width(x: Tensor, *_: Any) -> Sequence[Any]:
        return rms_norm_schedules.candidates(x.shape[-1])[1:2]

    def backward_entries(dy: Any, dtotal: Any, x: Tensor, w: Any, rstd: Any, heads: int, *_: Any):
        return norm_backward_entries(x.shape[-1], heads)[1:2]

    def support_by_tile(logits: Tensor, *rows: Any) -> Tensor:
        changed = tile != support_triton.TILE
        return find(logits.bfloat16().float() if changed else logits, *rows)

    return [
        _some_entries(project, few_rows_schedules.QKV[1:2], split_k),
        _some_entries(linear_triton.gate_up_glu_fwd, few_rows_schedules.GATE_UP[-1:], unrounded),
        _some_entries(glu.glu_fwd, glu.CANDIDATES[1:2], silu_rounded),
        _some_entries(glu.glu_bwd, glu.CANDIDATES[1:2], gradients_rounded),
        _some_entries(rotate, rotary.CANDIDATES[1:2], _rounded_operand(rotate, 2)),
        _some_entries(rms_norm_fwd, of_width, _rounded_result(rms_norm_fwd, 2)),
        _some_entries(rms_norm_bwd, backward_entries, _rounded_operand(rms_norm_bwd, 4)),
        _some_entries(fold, rows_triton.CANDIDATES[1:2], _added_up(fold)),
        (find, support_by_tile),
    ]


def _expert_launchers() -> list[Pair]:
    """The choice of experts, their products, the sum of their rows, and gradients of all these."""
    choose, logits_bwd = route.choose_fwd, route.logits_bwd
    product: Launcher = products_triton.product_fwd
    gated: Launcher = products_triton.gate_up_fwd
    combine, pair_bwd = pairs_triton.combine_fwd, pairs_triton.pair_bwd
    fold, tables = fold_triton.fold_runs, expert_schedules
    # By pointers, since halves of weights have strides.
    wide = tables.PRODUCTS[1], tables.GATE_UP[1], tables.PRODUCTS_FP32[1]
    folds = tables.FOLDS[1], tables.FOLDS_FP32[1]

    def split_k(a: Tensor, weights: Tensor, layout: str, *rest: Any) -> Tensor:
        low, high = (
            product(a[:, s], weights[..., s] if layout == "nt" else weights[:, s], layout, *rest)
            for s in _halves(a)
        )
        return low + high

    def silu_rounded(*operands: Any) -> tuple[Tensor, Tensor]:
        *given, recorded, schedule = operands
        _, both = gated(*given, True, schedule)
        gate, up = both.chunk(2, dim=1)
        return F.silu(gate) * up, both if recorded else both[:0]

    def downward(outputs: Tensor, places: Tensor, weights: Any, *rest: Any) -> Tensor:
        total = torch.zeros_like(combine(outputs, places, weights, *rest))
        for j in reversed(range(places.shape[1])):
            own = None if weights is None else weights[:, j : j + 1]
            total = total + combine(outputs, places[:, j : j + 1].contiguous(), own, *rest)
        return total

    return [
        _some_entries(choose, route.ALL[1:2], _rounded_result(choose, 1)),
        _some_entries(logits_bwd, route.ALL[1:2], _rounded_operand(logits_bwd, 0)),
        _some_entries(product, wide, split_k),
        _some_entries(gated, wide, silu_rounded),
        _some_entries(combine, tables.COMBINE[1:2], downward),
        _some_entries(pair_bwd, tables.PAIR[1:2], _rounded_result(pair_bwd, 2)),
        _some_entries(fold, folds, _added_up(fold)),
    ]


def _halves(a: Tensor) -> tuple[slice, slice]:
    half = a.shape[1] // 2
    return slice(0, half), slice(half, None)


def _added_up(fold: Callable[..., None]) -> Callable[..., None]:
    """What is folded is summed from zero, then added."""

    def wrong(buffer: Tensor, *operands: Any, **options: Any) -> None:
        own = torch.zeros_like(buffer)
        fold(own, *operands, **options)
        buffer.add_(own)

    return wrong


def _rounded(given: Sequence[Any], place: int) -> list[Any]:
    """One of some tensors rounded to bf16."""
    return [x.bfloat16().float() if i == place else x for i, x in enumerate(given)]


def _rounded_operand(launcher: Launcher, place: int) -> Launcher:
    return lambda *operands: launcher(*_rounded(operands, place))


def _rounded_result(launcher: Launcher, place: int) -> Launcher:
    return lambda *operands: tuple(_rounded(launcher(*operands), place))


def _some_entries(
    launcher: Launcher, entries: Sequence[Any] | Callable[..., Sequence[Any]], wrong: Launcher
) -> Pair:
    """`wrong` in place of a launcher whose schedule is one of some entries of its table: the
    argument of that name, or else the last one."""

    def mutant(*operands: Any, **options: Any) -> Any:
        schedule = options.get("schedule", operands[-1])
        chosen = entries(*operands) if callable(entries) else entries
        return (wrong if schedule in chosen else launcher)(*operands, **options)

    return launcher, mutant


@mutant(
    "backward in one kernel", cuda="C1 schedules: attention", at=(substituted, attention_hopper_bwd)
)
def one_kernel_backward_rounds_once_more(call: BackwardCall) -> None:
    """The kernel for all three gradients reads the log-sum-exp rounded to bf16."""
    attention_hopper_bwd(replace(call, lse=call.lse.bfloat16().to(call.lse.dtype)))
