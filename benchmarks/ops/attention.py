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
from benchmarks.suite import Case, normal
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The efficient backend takes no grouped heads; it then appears under `unavailable`."""

SCALE = HEAD_DIM**-0.5
MAX_LAYERS = 24

Heads = tuple[int, int]
"""Query heads; key and value heads."""


def prefill_cases(
    work: str, heads: Sequence[Heads], lengths: Sequence[int], tokens: int
) -> list[Case]:
    """Causal self-attention over packed sequences of one length, `tokens` in all.

    `work` is `attention forward` or `attention backward`.
    """
    run = {"attention forward": _forward, "attention backward": _backward}[work]
    return [
        Case(
            work=work,
            shape={"length": n, "batch": tokens // n, "heads": f"{h[0]}/{h[1]}"},
            run=partial(run, h, n, tokens // n),
        )
        for h in heads
        for n in lengths
    ]


def _packed(heads: Heads, length: int, count: int, bench: Machine) -> tuple[Any, list[Tensor]]:
    """`count` sequences, and their queries, keys and values."""
    layout = PackedSequences.of(range(0, length * count, length), [length] * count)
    sizes = (heads[0], heads[1], heads[1])
    return layout, [normal(bench, length * count, size, HEAD_DIM) for size in sizes]


def _forward(heads: Heads, length: int, count: int, bench: Machine) -> dict[str, Any]:
    layout, (q, k, v) = _packed(heads, length, count, bench)
    batched = [_batched(x, count) for x in (q, k, v)]
    race = Race(
        ours=Contestant.of(lambda: attention_varlen(q, k, v, layout, scale=SCALE)[0]),
        stock=_stock(lambda: _sdpa(*batched, causal=True)),
        moved_bytes=_bytes(q, k, v, q),
        operations=_operations(heads[0], length, count),
    )
    return bench.measure(race)


def _backward(heads: Heads, length: int, count: int, bench: Machine) -> dict[str, Any]:
    layout, leaves = _packed(heads, length, count, bench)
    q, k, v = (x.requires_grad_() for x in leaves)
    do = normal(bench, length * count, heads[0], HEAD_DIM)

    def gradients(out: Tensor, cotangent: Tensor) -> Contestant:
        return Contestant.of(lambda: torch.autograd.grad(out, leaves, cotangent, retain_graph=True))

    stock, unavailable = {}, {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                out = _sdpa(*(_batched(x, count) for x in leaves), causal=True)
        except RuntimeError as error:
            unavailable[name] = str(error).splitlines()[0][:200]
        else:
            stock[name] = gradients(out, _batched(do, count))
    race = Race(
        ours=gradients(attention_varlen(q, k, v, layout, scale=SCALE)[0], do),
        stock=stock,
        moved_bytes=2 * _bytes(*leaves, do),
        operations=2.5 * _operations(heads[0], length, count),
        unavailable=unavailable,
    )
    return bench.measure(race)


def decode_cases(
    heads: Sequence[Heads], batches: Sequence[int], contexts: Sequence[int]
) -> list[Case]:
    """One new token per sequence: ours from a paged cache, stock from contiguous tensors."""
    return [
        Case(
            work="attention decode",
            shape={"batch": b, "context": n, "heads": f"{h[0]}/{h[1]}"},
            run=partial(_decode, h, b, n),
        )
        for h in heads
        for b in batches
        for n in contexts
    ]


def _decode(heads: Heads, batch: int, context: int, bench: Machine) -> dict[str, Any]:
    kv_heads, blocks = heads[1], batch * context // CACHE_BLOCK
    cached_bytes = 2 * 2 * batch * context * kv_heads * HEAD_DIM
    layers = range(min(bench.copies(cached_bytes), MAX_LAYERS))
    block = (CACHE_BLOCK, kv_heads, HEAD_DIM)
    caches = [[normal(bench, blocks, *block) for _ in layers] for _ in "kv"]
    # A cache in use is scattered: consecutive tokens of a sequence lie in unrelated blocks.
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(batch, -1)
    last = tables[:, -1] * CACHE_BLOCK + CACHE_BLOCK - 1
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
    q, rows = normal(bench, batch, heads[0], HEAD_DIM), tables.to(bench.device)
    contiguous = [
        [cache[rows].flatten(1, 2).transpose(1, 2).contiguous() for cache in side]
        for side in caches
    ]
    stock_q, pairs = q.unsqueeze(2), zip(*contiguous, strict=True)
    race = Race(
        ours=Contestant([partial(_paged, q, paged, layer) for layer in layers]),
        stock=_stock(*(partial(_sdpa, stock_q, k, v, causal=False) for k, v in pairs)),
        clock="graph",
        moved_bytes=cached_bytes + 2 * _bytes(q),
        operations=4.0 * batch * heads[0] * context * HEAD_DIM,
    )
    return bench.measure(race)


def _paged(q: Tensor, paged: PagedAttention, layer: int) -> Tensor:
    return attention_paged(q, paged, layer, scale=SCALE)[0]


def _stock(*calls: Callable[[], object]) -> dict[str, Contestant]:
    return {name: Contestant(calls, partial(sdpa_kernel, b)) for name, b in BACKENDS.items()}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)


def _batched(x: Tensor, count: int) -> Tensor:
    """[T, H, D] -> [count, H, T / count, D], a view."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def _bytes(*tensors: Tensor) -> float:
    return float(sum(x.nbytes for x in tensors))


def _operations(query_heads: int, length: int, count: int) -> float:
    """Of the causal forward: two products over half of the square."""
    return 2.0 * count * query_heads * length * length * HEAD_DIM
