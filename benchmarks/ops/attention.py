"""Attention against torch's scaled_dot_product_attention, each backend on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shapes import CACHE_BLOCK, HEAD_DIM
from benchmarks.suite import gradients, normal
from benchmarks.timing import Call, Contestant, Machine, Race
from rl_consistency.kernels.attention.cache_write_triton import zero_cache
from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The efficient backend takes no grouped heads; it then appears under `unavailable`."""

MAX_LAYERS = 24


def _packed(
    bench: Machine, heads: str, length: int, batch: int, dim: int
) -> tuple[Any, list[Tensor]]:
    """`batch` sequences, and their queries, keys and values."""
    layout = PackedSequences.of(range(0, length * batch, length), [length] * batch)
    query, kv = map(int, heads.split("/"))
    return layout, [normal(bench, length * batch, size, dim) for size in (query, kv, kv)]


def attention_forward(
    bench: Machine, length: int, batch: int, heads: str, head_dim: int = HEAD_DIM
) -> dict[str, Any]:
    """Causal self-attention over packed sequences of one length; `heads` are those of queries, and
    of keys and values: "16/8"."""
    layout, (q, k, v) = _packed(bench, heads, length, batch, head_dim)
    batched = [_batched(x, batch) for x in (q, k, v)]
    race = Race(
        ours=Contestant.of(lambda: attention_varlen(q, k, v, layout, scale=_scale(q))[0]),
        stock=_stock(lambda: [lambda: _sdpa(*batched, causal=True)]),
        moved_bytes=_bytes(q, k, v, q),
        operations=_operations(q, length),
    )
    return bench.measure(race)


def attention_backward(
    bench: Machine, length: int, batch: int, heads: str, head_dim: int = HEAD_DIM
) -> dict[str, Any]:
    """The gradients of causal self-attention over packed sequences of one length."""
    layout, leaves = _packed(bench, heads, length, batch, head_dim)
    q, k, v = (x.requires_grad_() for x in leaves)
    do = torch.randn_like(q)

    def ours() -> Tensor:
        return attention_varlen(q, k, v, layout, scale=_scale(q))[0]

    def stock() -> Tensor:
        return _sdpa(*(_batched(x, batch) for x in leaves), causal=True)

    race = Race(
        ours=Contestant.of(gradients(ours, leaves, lambda _: do)),
        stock=_stock(lambda: [gradients(stock, leaves, lambda _: _batched(do, batch))]),
        moved_bytes=2 * _bytes(*leaves, do),
        operations=2.5 * _operations(q, length),
    )
    return bench.measure(race)


def attention_decode(
    bench: Machine, batch: int, context: int, heads: str, head_dim: int = HEAD_DIM
) -> dict[str, Any]:
    """One new token per sequence: ours from a paged cache, stock from contiguous tensors."""
    query_heads, kv_heads = map(int, heads.split("/"))
    blocks = batch * -(-context // CACHE_BLOCK)
    cached_bytes = 2 * 2 * batch * context * kv_heads * head_dim
    layers = range(min(bench.copies(cached_bytes), MAX_LAYERS))
    size = (blocks, CACHE_BLOCK, kv_heads, head_dim)
    kind = {"dtype": torch.bfloat16, "device": bench.device}
    caches = [[zero_cache(*size, **kind).copy_(normal(bench, *size)) for _ in layers] for _ in "kv"]
    # A cache in use is scattered: consecutive tokens of a sequence lie in unrelated blocks.
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(batch, -1)
    last = tables[:, -1] * CACHE_BLOCK + (context - 1) % CACHE_BLOCK
    paged = PagedAttention(
        query_starts=range(batch),
        query_lens=[1] * batch,
        context_lens=[context] * batch,
        block_tables=tables.tolist(),
        slot_mapping=last.to(bench.device),
        key_cache=caches[0],
        value_cache=caches[1],
        block_size=CACHE_BLOCK,
    )
    q, rows = normal(bench, batch, query_heads, head_dim), tables.to(bench.device)
    contiguous = [
        [cache[rows].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in side]
        for side in caches
    ]
    calls = [partial(_sdpa, q.unsqueeze(2), *kv, causal=False) for kv in zip(*contiguous)]
    race = Race(
        ours=Contestant([partial(_paged, q, paged, layer) for layer in layers]),
        stock=_stock(lambda: calls),
        clock="graph",
        moved_bytes=cached_bytes + 2 * _bytes(q),
        operations=4.0 * batch * query_heads * context * head_dim,
    )
    return bench.measure(race)


def _paged(q: Tensor, paged: PagedAttention, layer: int) -> Tensor:
    return attention_paged(q, paged, layer, scale=_scale(q))[0]


def _stock(calls: Callable[[], Sequence[Call]]) -> dict[str, Contestant]:
    """Every backend, with calls of its own."""
    return {name: Contestant(calls(), partial(sdpa_kernel, b)) for name, b in BACKENDS.items()}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=_scale(q), enable_gqa=True
    )


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


def _batched(x: Tensor, count: int) -> Tensor:
    """[T, H, D] -> [count, H, T / count, D], a view."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def _bytes(*tensors: Tensor) -> float:
    return float(sum(x.nbytes for x in tensors))


def _operations(q: Tensor, length: int) -> float:
    """Operations of the causal forward over sequences of a length: two products over half of the
    square."""
    return 2.0 * q.numel() * length
