"""o = softmax(scale * q k^T + mask) v, causal, per sequence, as a fold over blocks of keys.

Shapes: q [T, H, D], k and v [T, Hkv, D] (packed) or [num_blocks, block_size, Hkv, D] (paged) ->
    o [T, H, D], lse [T, H] fp32 (natural log). Hkv divides H (GQA); D: multiples of 16 up to 256.
Dtypes and rounding points: fp32, bf16, fp16. Scores, statistics and accumulators are fp32.
    Probabilities are rounded to the dtype of v before the product with v, on a CPU also before
    their sum. o is rounded once. Backward rounds probabilities and score gradients before products.
Order: ORDER below, `attention`.
Invariant to: other sequences, the number of queries in the call (prefill, chunk, decode), where
    keys lie, the cache's block size, tiles, rows that no sequence owns (they give 0). Backward on
    CUDA expects finite neighbours: a NaN in another sequence may spread. A key or value that is not
    finite also reaches earlier rows of its sequence in its block of keys: 0 times NaN is NaN.
Varies with: D, the window, a key's distance from its sequence's start (block borders).
Backward: dq, dk, dv without atomics; packed layout only. lse has no gradient.
Errors: TypeError on dtypes, ValueError on shapes, devices, layout and autocast.
Cost: on a CPU two batched products per 64 keys. On CUDA see benchmarks/results/h200.json.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao et al.,
    FlashAttention (2022).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.cpu import attention_cpu_bwd, attention_cpu_fwd, visible
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences, PagedAttention
from rl_consistency.kernels.attention.schedules import lse_dtype
from rl_consistency.kernels.core.autograd import apply, once_differentiable, unrecorded
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.core.torch_op import kernel_op, plain

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16

ORDER = ReductionOrder(
    id="attention",
    version=3,
    cpu="""\
Blocks of 64 keys, counted from the sequence's first token. From m = -inf, l = acc = 0, upward:
    s = (q.k in the matmul order over D) * scale; m' = max(m, max s); a = exp(m - m')
    p = exp(s - m') rounded to the dtype of v
    l = l*a + tree(p); acc = acc*a + (p.v in the matmul order over the block); m = m'
o = acc/l; lse = m + log(l)
Backward in tiles of 64 queries by 64 keys, both counted from the sequence's first token:
    p = exp(s - lse); ds = p*(do.v - tree(do*o)); both rounded to the dtype
    dq += ds.k over key tiles upward
    dk += ds.q, dv += p.do over query tiles upward, each first summed over the group's heads upward
    dq, dk times scale
-0 becomes +0.""",
    cuda="""\
Blocks of 128 keys (64 where D > 128), counted from the sequence's first token; c = scale*log2(e).
Each block on its own, products in matrix steps from zero:
    s = q.k; m_b = max(s)*c; p = exp2(fma(s, c, -m_b)); l_b = p halved to eight lanes
    acc_b = (p rounded to the dtype).v
From m = -inf, l = acc = 0, over blocks upward:
    m' = max(m, m_b); a = exp2(m - m'); b = exp2(m_b - m')
    l = fma(l_b, b, l*a); acc = fma(acc_b, b, acc*a); m = m'
o = acc*(1/tree(l)); lse = (m + log2 tree(l))*ln 2
Backward:
    p = exp2(fma(s, c, -lse*log2(e))); ds = p*(do.v - tree(do*o)); both rounded to the dtype
    dq = ds.k, one chain of matrix steps over keys upward
    dk = ds.q, dv = p.do, one chain each over the group's heads upward, then over queries upward
    dq, dk times scale
fp32: lse is kept in fp64; a step of dq sums 32 keys from zero, one of dk and dv 32 queries, into
fp64.
-0 becomes +0.""",
)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedSequences,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal self-attention over packed sequences, differentiable in q, k and v.

    Args:
        q: [T, H, D].
        k, v: [T, Hkv, D].
        layout: where each sequence lies among the T rows.
        scale: factor on the scores.
        window: each query sees itself and the `window - 1` tokens before it; None sees all.

    Returns (o [T, H, D], lse [T, H] fp32).
    """
    _check(q, k, v, layout, scale, window)
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"attention: q has {q.shape[0]} rows but k has {k.shape[0]}; packed keys stand in the "
            "rows of their queries."
        )
    return apply(_Attention, q, k, v, layout, scale, window)


def attention_paged(
    q: Tensor,
    paged: PagedAttention,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_varlen` over keys and values in a layer's paged cache, without gradient.

    `q` [T, H, D] belongs to the new tokens; `paged.write` must have stored their keys and values.
    If these are given as `new`, [T, Hkv, D] each, sequences without a past read them there. o goes
    into `out`, if given, whose rows that no sequence owns keep what they hold or become 0.
    """
    keys, values = paged.key_cache[layer], paged.value_cache[layer]
    k, v = keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])
    _check(q, k, v, paged, scale, window)
    packed, rest = paged.by_past() if new is not None and q.is_cuda else (None, paged)
    results = None
    if out is not None and q.is_cuda:
        results = out, q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    with unrecorded():
        if packed is not None and new is not None:
            _check(q, *new, packed, scale, window)
            results = attention_fwd(q, *new, packed, scale, window, into=results)
        if rest is not None and results is not None:
            results = attention_fwd(q, k, v, rest, scale, window, into=results)
        o, lse = results or _forward(q, k, v, paged, scale, window)
        if out is not None and o is not out:
            o = out.copy_(o)
        return o, lse.float()


def attention_into(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedSequences,
    scale: float,
    window: int | None,
) -> None:
    """`attention_varlen` into `empty_results`, without a gradient."""
    _check(q, k, v, layout, scale, window)
    out, lse = results
    if not q.is_cuda:
        for result, found in zip(results, attention_cpu_fwd(q, k, v, layout, scale, window)):
            result.copy_(found)
        return
    if not layout.owns(q.shape[0]):
        out.zero_()
        lse.fill_(-math.inf)
    attention_fwd(q, k, v, layout, scale, window, into=results)


def attention_gradients_into(
    gradients: tuple[Tensor, Tensor, Tensor],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    layout: PackedSequences,
    scale: float,
    window: int | None,
) -> None:
    """Fill `gradients`, that is dq, dk and dv, after `attention_into` has filled `results`."""
    if q.is_cuda:
        attention_bwd(do, q, k, v, *results, layout, scale, window, into=gradients)
        return
    found = attention_cpu_bwd(do, q, k, v, *results, layout, scale, window)
    for gradient, computed in zip(gradients, found, strict=True):
        gradient.copy_(computed)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for o [T, H, D] and lse [T, H] of queries [T, H, D]."""
    dtype = lse_dtype(q.dtype) if q.is_cuda else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=dtype)


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, window: int | None
) -> None:
    require_operands("attention", q=q, k=k, v=v)
    heads, head_dim = q.shape[-2:]
    if k.shape != v.shape or k.shape[-1] != head_dim or heads % k.shape[-2]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; k and v are "
            "alike, head_dim is shared, and query heads are a multiple of key heads."
        )
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"attention: head_dim {head_dim}; allowed: multiples of 16 up to {MAX_HEAD_DIM}."
        )
    if scale <= 0:
        raise ValueError(f"attention: scale {scale}; it must be positive.")
    if window is not None and window < 1:
        raise ValueError(
            f"attention: window {window}; it must be at least 1, or None for no window."
        )
    if layout.num_rows > q.shape[0]:
        raise ValueError(
            f"attention: the layout reaches row {layout.num_rows} but q has {q.shape[0]} rows."
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout, scale, window):
        out, lse = _forward(q, k, v, layout, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        lse = lse.float()
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        do, (q, k, v, out, lse), layout = grad_outputs[0], ctx.saved_tensors, ctx.layout
        scores = ctx.scale, ctx.window
        if not q.is_cuda:
            found = attention_cpu_bwd(do, q, k, v, out, lse, layout, *scores)
        elif _observed(do, q, k, v):
            starts, lens = list(layout.query_starts), list(layout.query_lens)
            found = attention_packed_bwd(do, q, k, v, out, lse, starts, lens, *scores)
        else:
            found = attention_bwd(do, q, k, v, out, lse, layout, *scores)
        return *found, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """(o, lse), lse in `lse_dtype` on CUDA."""
    if not q.is_cuda:
        return attention_cpu_fwd(q, k, v, layout, scale, window)
    if isinstance(layout, PackedSequences) and _observed(q, k, v):
        starts, lens = list(layout.query_starts), list(layout.query_lens)
        return attention_packed_fwd(q, k, v, starts, lens, scale, window)
    return attention_fwd(q, k, v, layout, scale, window)


def _observed(*operands: Tensor) -> bool:
    """Whether a compiler or a tensor subclass must see a registered op."""
    return torch.compiler.is_compiling() or not plain(operands)


def _fake_fwd(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))


@kernel_op(fake=_fake_fwd)
def attention_packed_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    lens: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """`attention_fwd` of packed sequences as a registered op, which takes the layout as lists."""
    return attention_fwd(q, k, v, PackedSequences.of(starts, lens), scale, window)


@kernel_op(fake=lambda do, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))
def attention_packed_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: list[int],
    lens: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_bwd` as a registered op."""
    layout = PackedSequences.of(starts, lens)
    return attention_bwd(do, q, k, v, out, lse, layout, scale, window)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """o of one sequence, q [T, H, D], k and v [T, Hkv, D], in fp64; for accuracy tests only."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    positions = torch.arange(q.shape[1], device=q.device)
    scores = (q @ k.transpose(1, 2)) * scale
    scores = scores.masked_fill(~visible(positions, positions, window), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)
