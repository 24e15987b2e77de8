"""Ways to make the program wrong, on a CPU and on a GPU alike, and the checks that must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from rl_consistency.kernels.attention.layout import CapturedPagedAttention
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.gradient_fold.gradient_buffer import _Gradient, fold_parameter
from rl_consistency.kernels.gradient_fold.op import STEP, fold_columns, fold_outer, fold_rows
from rl_consistency.kernels.linear import op as linear_op
from rl_consistency.kernels.linear.op import folded_weight, linear
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.pointwise.embedding import embedding
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_table
from rl_consistency.kernels.reduction.sums import gradient_norm, masked_mean, masked_sum, tree_sum
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.kernels.sampling.op import distribution
from rl_consistency.kernels.token_logprobs.op import lm_head_logits, token_logprobs
from rl_consistency.models import forward, packing
from rl_consistency.models.captured_layers import by_dtype
from rl_consistency.models.stock import stock_attention, stock_captured_attention
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.rollout.device import sampling_table
from rl_consistency.rollout.device.random_stream import device_uniforms
from rl_consistency.verify.checks.attention import cached_rows
from rl_consistency.verify.mutants.mutant import mutant
from rl_consistency.verify.substitution import attribute, substituted

FEW_ROWS = 40
"""Rows below which a row-dependent schedule switches; a packed sequence has at least 16."""


@mutant("split K", "C1 linear; token_logprobs; chain, packed; chain, logprobs")
def split_k_for_few_rows() -> AbstractContextManager[None]:
    """Products of few rows add two halves of K."""

    def few_nt(a: Tensor, b: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
        if len(a) >= FEW_ROWS:
            return matmul_nt(a, b, bias=bias, **options)
        half = a.shape[1] // 2
        total = matmul_nt(a[:, :half], b[:, :half]) + matmul_nt(a[:, half:], b[:, half:])
        total = total if bias is None else total + bias.float()
        return total.to(options.get("out_dtype", torch.float32))

    def few_nn(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        few = len(a) < FEW_ROWS
        return few_nt(a, b.t(), **options) if few else matmul_nn(a, b, **options)

    return substituted(matmul_nt, few_nt, matmul_nn, few_nn)


@mutant("row-dependent tile", "C1 linear", at=(substituted, matmul_nt))
def library_tile_for_few_rows(
    a: Tensor, b: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Below 8 rows a plain torch.mm takes over."""
    if len(a) >= 8:
        return matmul_nt(a, b, bias=bias, **options)
    return F.linear(a, b, bias).to(options.get("out_dtype", torch.float32))


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Any,
    scale: float,
    window: int | None,
    *,
    block: int = 64,
    at_padding: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch: sums over blocks of keys, sequence by sequence.

    `at_padding` counts the blocks from where left padding to the call's longest sequence begins.
    """
    longest, group = max(layout.context_lens, default=1), q.shape[1] // k.shape[1]
    key_rows = layout.key_rows(longest).to(q.device)
    spans = zip(layout.query_starts, layout.query_lens, layout.context_lens, strict=True)
    outs, stats, rows = [], [], []
    for i, (start, count, context) in enumerate(spans):
        first = (longest - context) % block if at_padding else 0
        own = q[start : start + count].float().transpose(0, 1)  # [H, n, D]
        keys, values = (
            x[key_rows[i, :context]].float().transpose(0, 1).repeat_interleave(group, 0)
            for x in (k, v)
        )
        places = torch.arange(context, device=q.device)
        distance = places[context - count :, None] - places
        hidden = (distance < 0) | (distance >= (window or context + 1))
        scores = (own @ keys.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        m = scores.detach().amax(-1, keepdim=True)
        p, length, acc = torch.exp(scores - m), torch.zeros_like(m), torch.zeros_like(own)
        for begin, end in pairwise([0, *range(block - first, context, block), context]):
            length = length + p[..., begin:end].sum(-1, keepdim=True)
            acc = acc + p[..., begin:end] @ values[:, begin:end]
        outs.append((acc / length).transpose(0, 1).to(q.dtype))
        stats.append((m + torch.log(length)).squeeze(-1).t().detach())
        rows.append(torch.arange(start, start + count, device=q.device))
    index, lse = torch.cat(rows), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    out = torch.zeros_like(q).index_copy(0, index, torch.cat(outs))
    return out, lse.index_copy(0, index, torch.cat(stats))


def _other_attention(attend: Callable[..., Any]) -> AbstractContextManager[None]:
    """Packed and paged attention by `attend`; by the right functions where it gives None."""

    def packed(q: Tensor, k: Tensor, v: Tensor, layout: Any, *, scale: float, window: Any = None):
        found = attend(q, k, v, layout, scale, window)
        return found or attention_varlen(q, k, v, layout, scale=scale, window=window)

    def cached(q: Tensor, layout: Any, layer: int, *, scale: float, window: Any = None, **_: Any):
        found = attend(q, *cached_rows(layout, layer), layout, scale, window)
        return found or attention_paged(q, layout, layer, scale=scale, window=window)

    return substituted(attention_varlen, packed, attention_paged, cached)


@mutant("KV split by length", "C1 attention; paged attention; chain, paged", at=(_other_attention,))
def key_block_by_length(q: Tensor, k: Tensor, v: Tensor, layout: Any, *settings: Any) -> Any:
    """The key block is 32 once the longest context passes 128."""
    if max(layout.context_lens, default=0) <= 128:
        return None
    return blockwise_attention(q, k, v, layout, *settings, block=32)


@mutant("KV block at padding", "C1 attention; chain, packed; chain, padded", at=(_other_attention,))
def keys_anchored_at_padding(*operands: Any) -> Any:
    """Key blocks are counted from the padded column, not the first token."""
    return blockwise_attention(*operands, at_padding=True)


@mutant(
    "other decode order",
    "C1 paged attention; chain, paged",
    "C2 rollout and training",
    at=(substituted, attention_paged),
)
def stock_decode(
    q: Tensor, paged: Any, layer: int, *, scale: float, window: int | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The paged cache is read by torch's scaled_dot_product_attention."""
    if isinstance(paged, CapturedPagedAttention):
        out = stock_captured_attention(q, paged, layer, scale=scale, window=window)
    else:
        k, v = cached_rows(paged, layer)
        out = stock_attention(q, k, v, paged, scale=scale, window=window)
    return out, torch.zeros(q.shape[:2], device=q.device)


@mutant("library row sums", "C1 attention; attention backward", at=(_other_attention,))
def library_row_sums_in_large_calls(
    q: Tensor, k: Tensor, v: Tensor, layout: Any, *settings: Any
) -> Any:
    """In large calls a row is summed by torch.sum, all keys at once."""
    if len(q) <= FEW_ROWS:
        return None
    return blockwise_attention(q, k, v, layout, *settings, block=max(layout.context_lens))


@mutant("stock silu", "C1 glu", at=(substituted, glu))
def library_silu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Few rows go through torch's silu."""
    if activation != "silu" or len(gate) >= FEW_ROWS:
        return glu(gate, up, activation)
    return F.silu(gate) * up


@mutant("norm over the batch", "C1 rms_norm; chain, packed", at=(substituted, rms_norm))
def norm_reduced_over_the_batch(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    """The split of a norm's sum depends on the number of rows."""
    if x.numel() // x.shape[-1] >= FEW_ROWS:
        return rms_norm(x, weight, eps, **options)
    wide = x.float()
    halves = [part.square().sum(-1, keepdim=True) for part in wide.chunk(2, dim=-1)]
    rstd = 1.0 / ((halves[0] + halves[1]) / x.shape[-1] + eps).sqrt()
    return (wide * rstd * weight.float()).to(x.dtype)


@mutant("rope by length", "C1 rotary", at=(substituted, rotary_table))
def rope_scaled_by_length(inv_freq: Tensor, num_positions: int, scaling: float = 1.0) -> Tensor:
    """Frequencies depend on the longest position."""
    changed = inv_freq * min(1.0, 256 / num_positions) ** 0.01
    return rotary_table(changed, num_positions, scaling)


@mutant(
    "per-call quantization",
    "C1 embedding; chain, packed; chain, padded",
    at=(substituted, embedding),
)
def embedding_quantized_per_call(*args: Any, **kwargs: Any) -> Tensor:
    """Embeddings are quantized with one scale for the call."""
    rows = embedding(*args, **kwargs)
    step = rows.detach().abs().amax() / 32767
    return rows + ((rows.detach() / step).round() * step - rows.detach())


@mutant("padding in reductions", "C1 masked_reduction")
def padding_takes_part_in_reductions() -> AbstractContextManager[None]:
    """Masked values enter the tree as zeros instead of being left out."""

    def wrong_sum(values: Tensor, mask: Tensor | None = None) -> Tensor:
        return masked_sum(values if mask is None else values.masked_fill(~mask.bool(), 0.0))

    def wrong_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
        return wrong_sum(values, mask) / (values.numel() if mask is None else mask.bool().sum())

    return substituted(masked_sum, wrong_sum, masked_mean, wrong_mean)


@mutant("norm by threads", "C1 gradient_norm", at=(substituted, gradient_norm))
def norm_split_over_threads(gradients: Iterable[Tensor]) -> Tensor:
    """The gradient norm follows the number of threads, on a GPU the storage."""
    total = torch.zeros(())
    for gradient in gradients:
        flat = gradient.detach().float().flatten()
        total = total.to(flat.device)
        if not flat.is_cuda:
            for part in flat.chunk(torch.get_num_threads()):
                total = total + torch.dot(part, part)
        # A GPU has no such number; there the order follows how the tensor is stored.
        elif gradient.is_contiguous() and gradient.data_ptr() % 64 == 0:
            total = total + torch.dot(flat, flat)
        else:
            squares = flat.square().cpu().numpy()
            total = total + float(np.cumsum(squares, dtype=np.float32)[-1])
    return total.sqrt()


@mutant(
    "gradients added up",
    "C3 rms_norm; linear; router; experts; token_logprobs; chain, regrouped",
    at=(substituted, fold_parameter),
)
def gradients_added_up_per_call(
    ctx: Any, parameter: Any, buffer: Any, fold: Callable[[Any, bool], None], **options: Any
) -> Tensor | None:
    """Each call's gradient is summed from zero, then added."""

    def from_zero(accumulator: Tensor, fresh: bool) -> None:
        own = torch.zeros_like(accumulator)
        fold(own, True)
        accumulator.copy_(accumulator.float() + own.float())

    return fold_parameter(ctx, parameter, buffer, from_zero)


@mutant(
    "atomic accumulation",
    "C3 linear; chain, regrouped; chain, recomputed; chain, replayed",
    cuda="C3 linear; chain, regrouped; chain, recomputed",
)
def fold_steps_in_any_order() -> AbstractContextManager[None]:
    """The steps of a fold arrive in any order."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(rows: Tensor, step: int) -> Tensor:
        whole = torch.arange(len(rows) // step * step).view(-1, step)
        mixed = whole[torch.randperm(len(whole), generator=generator)].flatten()
        return torch.cat([mixed, torch.arange(len(mixed), len(rows))]).to(rows.device)

    def outer(buffer: Tensor, dy: Tensor, x: Tensor, **options: Any) -> None:
        order = shuffled(dy, STEP)
        fold_outer(buffer, dy[order], x[order], **options)

    def columns(buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1, **options: Any) -> None:
        order = shuffled(rows, STEP * rows_per_token)
        fold_columns(buffer, rows[order], rows_per_token=rows_per_token, **options)

    return substituted(fold_outer, outer, fold_columns, columns)


@mutant("gated values in eight bits", "C1 linear")
def gated_values_in_eight_bits() -> AbstractContextManager[Any]:
    """The backward pass of a down projection meets coarse values of the gated unit."""

    def of_coarse(ctx: Any, dy: Tensor, x: Callable[[], Tensor], *rest: Any) -> Tensor | None:
        if not hasattr(ctx, "activation"):  # a plain linear
            return folded_weight(ctx, dy, x, *rest)
        return folded_weight(ctx, dy, lambda: x().to(torch.float8_e4m3fn).to(dy.dtype), *rest)

    return attribute(linear_op, "folded_weight", of_coarse)


@mutant("sequences not aligned", "C3 chain, regrouped")
def sequences_not_aligned() -> AbstractContextManager[Any]:
    """Packed sequences do not start on a multiple of 16."""
    return attribute(packing, "ROW_ALIGNMENT", 1)


@mutant("accumulators as they are", cuda="C3 chain, replayed")
def captured_accumulators_not_zeroed() -> AbstractContextManager[None]:
    """A replayed pass goes on from what its accumulators hold, whether or not a step begins."""
    return substituted(by_dtype, lambda tensors: [])


# In the chain so few tokens repeat that on a GPU their bf16 gradients add up exactly in fp32.
@mutant("embedding shuffled", "C3 embedding; chain, regrouped", cuda="C3 embedding")
def embedding_gradient_in_any_order() -> AbstractContextManager[None]:
    """Repeated tokens are added in any order."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(buffer: Tensor, index: Tensor, rows: Tensor, **options: Any) -> None:
        order = torch.randperm(len(index), generator=generator).to(index.device)
        fold_rows(buffer, index[order], rows[order], **options)

    return substituted(fold_rows, shuffled)


@mutant("tied buffer", "C3 chain, regrouped")
def tied_weights_share_a_buffer() -> AbstractContextManager[Any]:
    """Embedding and LM head fold into one accumulator."""
    enter = _Gradient._enter

    def shared(self: _Gradient, use: int, accumulates: bool) -> None:
        enter(self, use, accumulates)
        held = next((part for part in self._accumulators if part is not None), None)
        self._accumulators = [held if i == use else None for i in range(self.uses)]

    return attribute(_Gradient, "_enter", shared)


@mutant("random stream per row", "C1 rollout engine", at=(substituted, device_uniforms))
def random_stream_per_row(keys: Tensor, positions: Tensor) -> Tensor:
    """Random numbers are keyed by the row of the batch."""
    row = torch.arange(len(keys), device=keys.device)[:, None]
    seed, other = keys[:, :2], torch.zeros_like(row)
    return device_uniforms(torch.cat([seed, other, row, other], dim=1), positions)


# In the rollout's forward pass alone; training keeps its own binding.
@mutant("another rounding", "C2 rollout and training", at=(attribute, forward, "lm_head_logits"))
def rollout_logits_rounded(hidden: Tensor, weight: Tensor) -> Tensor:
    """The rollout takes logprobs of logits rounded to bf16."""
    return lm_head_logits(hidden, weight).bfloat16().float()


@mutant(
    "two distributions",
    "C2 rollout and training",
    "C7 one function",
    at=(attribute, sampling_table, "distribution"),
)
def rollout_has_its_own_distribution(logits: Tensor, rows: Any) -> Any:
    """The rollout normalizes by a logsumexp of its own."""
    found: Any = distribution(logits, rows)
    return replace(found, log_normalizer=found.scaled.logsumexp(dim=1))


@mutant("blind fingerprint", "C7 fingerprint", at=(substituted, fingerprint))
def fingerprint_without_orders(device: torch.device | str = "cpu") -> Fingerprint:
    """The fingerprint leaves the orders out."""
    entries = fingerprint(device).entries
    return Fingerprint({k: value for k, value in entries.items() if not k.startswith("order.")})


@mutant(
    "half-precision sums",
    "C6 linear; rms_norm; rotary; glu; embedding; attention; router; experts; token_logprobs; "
    "masked_reduction; gradient_norm",
)
def sums_in_half_precision() -> AbstractContextManager[None]:
    """Results pass through bf16."""

    def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: tree_map(
            lambda x: x.bfloat16().to(x.dtype), function(*args, **kwargs)
        )

    def rounded_fold(buffer: Tensor, index: Tensor, rows: Tensor, **options: Any) -> None:
        fold_rows(buffer, index, rows, **options)
        buffer.copy_(buffer.bfloat16())

    functions = linear, rms_norm, rotary, glu, attention_varlen, token_logprobs, tree_sum
    functions += route_with_logits, experts
    pairs = [x for function in functions for x in (function, rounded(function))]
    return substituted(fold_rows, rounded_fold, *pairs)
