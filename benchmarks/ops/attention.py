"""Attention against the backends of torch's SDPA: packed sequences, and decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ops.dense import normal
from benchmarks.ops.elementwise import gradients
from benchmarks.timing import Call, Contestant, Machine
from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.attention.paged_cache_triton import zero_cache

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
"""The efficient backend takes no grouped heads; it then appears under `unavailable`. The last runs
on a CPU only, which has no other for grouped heads."""

CACHE_BLOCK, MAX_LAYERS = 16, 24


def attention(
    backward: bool, bench: Machine, length: int, batch: int, heads: str, head_dim: int
) -> dict[str, Any]:
    """Causal self-attention over packed sequences of one length, or its gradients; `heads` are
    those of queries, and of keys and values: "16/8"."""
    layout = PackedSequences.of(range(0, length * batch, length), [length] * batch)
    query, kv = map(int, heads.split("/"))
    leaves = [normal(bench, length * batch, size, head_dim) for size in (query, kv, kv)]
    q, k, v = (x.requires_grad_(backward) for x in leaves)
    do = torch.randn_like(q)

    def ours() -> Tensor:
        return attention_varlen(q, k, v, layout, scale=head_dim**-0.5)[0]

    def stock() -> Tensor:
        heads_first = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in leaves)
        return _sdpa(*heads_first, causal=True).transpose(1, 2)

    def calls(forward: Callable[[], Tensor], dy: Tensor) -> list[Call]:
        return [gradients(forward, leaves, [dy]) if backward else forward]

    moved = float(sum(x.nbytes for x in (*leaves, q)))
    return bench.measure(
        ours=Contestant(calls(ours, do)),
        stock=_backends(bench, lambda: calls(stock, do.view(batch, length, *do.shape[1:]))),
        moved_bytes=2 * moved if backward else moved,
        # Causal: two products over half of the square; five in backward.
        operations=(2.5 if backward else 1.0) * 2.0 * q.numel() * length,
    )


def attention_decode(
    bench: Machine, batch: int, context: int, heads: str, head_dim: int
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

    def ours(layer: int) -> Tensor:
        return attention_paged(q, paged, layer, scale=head_dim**-0.5)[0]

    def stock(keys: Tensor, values: Tensor) -> Tensor:
        return _sdpa(q.unsqueeze(2), keys, values, causal=False).squeeze(2)

    calls = [partial(stock, *kv) for kv in zip(*contiguous, strict=True)]
    return bench.measure(
        ours=Contestant([partial(ours, layer) for layer in layers]),
        stock=_backends(bench, lambda: calls),
        clock="graph",
        moved_bytes=float(cached_bytes + 2 * q.nbytes),
        operations=4.0 * batch * query_heads * context * head_dim,
    )


def _backends(bench: Machine, calls: Callable[[], Sequence[Call]]) -> dict[str, Contestant]:
    """Every backend of the device, with calls of its own."""
    cuda = bench.device.type == "cuda"
    return {
        name: Contestant(calls(), partial(sdpa_kernel, backend))
        for name, backend in BACKENDS.items()
        if cuda == (backend != SDPBackend.MATH)
    }


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    scale = q.shape[-1] ** -0.5
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
