"""C1 for attention: prefill, chunks and decode, packed and paged, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.attention import SCORE_SCALE
from rl_consistency.cases.case import Heads
from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.attention.paged_cache_triton import write_cache
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.parity.sides import PagedCall, paged_calls
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import rows_of
from rl_consistency.verify.sweep import OpSetup, Sweep

Sample = tuple[Tensor, Tensor, Tensor]
"""q [n, H, D], k and v [n, Hkv, D] of one sequence."""
Plan = tuple[str, int, list[int], Callable[[int], list[int]]]
"""Name, tokens of a cache block, samples, and length -> sizes of the parts."""


def check_attention(tally: Tally, setup: OpSetup) -> None:
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, setup.sweep.sample_lengths(), setup)
        sequences_alike(tally, shape, samples, setup.sweep.arrangements())


def check_attention_backward(tally: Tally, setup: OpSetup) -> None:
    arrangements = [
        (name, calls if name == "permuted batch" else calls[:4])
        for name, calls in setup.sweep.arrangements()
    ]
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, setup.sweep.sample_lengths(), setup)
        sequences_alike(tally, shape, samples, arrangements, packed_gradients)


def check_paged_attention(tally: Tally, setup: OpSetup) -> None:
    """The paged cache against packed prefill: every chunk size, block size, and decode."""
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, setup.sweep.sample_lengths(), setup)
        paged_alike(tally, shape, samples, paged_plans(setup.sweep))


def packed_attention(shape: Heads, samples: Sequence[Sample], gap: int = 0) -> list[Tensor]:
    """[n, H * (D + 1)] fp32 per sample: outputs, then lse. Rows between them are NaN."""
    layout, (q, k, v) = packed(samples, gap, junk=[torch.nan] * 3)
    found = attention_varlen(q, k, v, layout, scale=shape.scale, window=shape.window)
    return of_sequences(layout, *found)


def packed_gradients(shape: Heads, samples: Sequence[Sample], gap: int = 0) -> list[Tensor]:
    """[n, (H + 2 Hkv) * D] fp32 per sample: dq, dk, dv. Rows between them are finite, as backward
    expects."""
    layout, operands = packed(samples, gap, junk=[3.0] * 3)
    q, k, v = (x.requires_grad_() for x in operands)
    out, _ = attention_varlen(q, k, v, layout, scale=shape.scale, window=shape.window)
    out.backward(q.detach())
    return of_sequences(layout, *(x.grad for x in (q, k, v) if x.grad is not None))


def of_sequences(layout: AttentionLayout, *parts: Tensor) -> list[Tensor]:
    """Results of one call side by side, cut into those of each sequence."""
    rows = rows_of(*parts)
    spans = zip(layout.query_starts, layout.query_lens, strict=True)
    return [rows[start : start + n] for start, n in spans]


def sequences_alike(
    tally: Tally,
    shape: Heads,
    samples: Sequence[Sample],
    arrangements: Iterable[tuple[str, Sequence[Sequence[int]]]],
    run: Callable[..., list[Tensor]] = packed_attention,
) -> None:
    """The law of packing: a sequence alone and among others, with and without junk between them,
    gives the same outputs and lse; with `packed_gradients` the same dq, dk and dv."""
    alone = [run(shape, [s])[0] for s in samples]
    for name, calls in arrangements:
        for gap in (0, 2) if name == "permuted batch" else (0,):
            for members in calls:
                found = run(shape, [samples[i] for i in members], gap)
                _compare(tally, f"{shape}, {name}, gap {gap}", members, alone, found)


def paged_alike(
    tally: Tally, shape: Heads, samples: Sequence[Sample], plans: Iterable[Plan]
) -> None:
    """The law of the cache: plans as of `paged_plans` give the bytes of packed prefill."""
    alone = [packed_attention(shape, [s])[0] for s in samples]
    for name, block_size, members, cut in plans:
        own = [samples[i] for i in members]

        def run(call: PagedCall, own: list[Sample] = own) -> Tensor:
            q, k, v = call_operands(own, call)
            write_cache(call.paged, 0, k, v)
            options = {"scale": shape.scale, "window": shape.window}
            return rows_of(*attention_paged(q, call.paged, 0, **options))

        schedules, cache = [cut(len(s[0])) for s in own], cache_of(shape, own[0][0])
        found = paged_rows(schedules, run, block_size=block_size, **cache)
        _compare(tally, f"{shape}, {name}", members, alone, found)


def attention_probe(shape: Heads, lengths: Sequence[int], setup: OpSetup) -> list[Sample]:
    """Operands of one sample per length."""

    def drawn(length: int, heads: int, seed: int) -> Tensor:
        return setup.drawn((length, heads, shape.head_dim), seed, SCORE_SCALE)

    kv = shape.kv_heads
    return [
        (drawn(n, shape.heads, 3 * i), drawn(n, kv, 3 * i + 1), drawn(n, kv, 3 * i + 2))
        for i, n in enumerate(lengths)
    ]


def chunked(length: int, chunk: int) -> list[int]:
    """Sizes of the parts of a sequence cut into chunks."""
    return [min(chunk, length - start) for start in range(0, length, chunk)]


def decoded(length: int) -> list[int]:
    """One part for the prompt, then the last 12 tokens one at a time."""
    tail = min(length, 12)
    return ([length - tail] if length > tail else []) + [1] * tail


def paged_plans(sweep: Sweep) -> Iterator[Plan]:
    """Those of a sweep: every chunk size, decode, and one prefill per block size."""
    longest = max(sweep.sample_lengths())
    ways: list[Any] = [(f"chunk {c}", c, partial(chunked, chunk=c)) for c in sweep.chunks]
    ways += [("decode", longest, decoded)]
    ways += [("prefill", longest, lambda n: [n]) for _ in sweep.cache_blocks]
    for (name, chunk, cut), size in zip(ways, cycle(sweep.cache_blocks), strict=False):
        yield f"{name}, cache blocks of {size}", size, sweep.paged_samples(chunk), cut


def paged_rows(
    schedules: Sequence[Sequence[int]], run: Callable[[PagedCall], Tensor], **cache: Any
) -> list[Tensor]:
    """Rows of each sequence out of all `paged_calls`; `run` gives the rows of one call."""
    parts: list[list[Tensor]] = [[] for _ in schedules]
    for call in paged_calls(schedules, **cache):
        rows = run(call).split([end - start for _, start, end in call.spans])
        for (i, _, _), part in zip(call.spans, rows, strict=True):
            parts[i].append(part)
    return [torch.cat(p) for p in parts]


def call_operands(samples: Sequence[Sample], call: PagedCall) -> list[Tensor]:
    """q, k and v of the tokens of one call."""
    return [torch.cat([samples[i][j][a:b] for i, a, b in call.spans]) for j in range(3)]


def cache_of(shape: Heads, q: Tensor) -> dict[str, Any]:
    """Options of `paged_calls` for one layer of queries like q."""
    options = {"num_layers": 1, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return options | {"dtype": q.dtype, "device": q.device}


def cached_rows(paged: Any, layer: int) -> list[Tensor]:
    """Keys and values [slots, Hkv, D] of one layer's cache."""
    caches = (paged.key_cache[layer], paged.value_cache[layer])
    return [cache.view(-1, *cache.shape[2:]) for cache in caches]


def packed(
    samples: Sequence[Sequence[Tensor]], gap: int = 0, *, junk: Sequence[Any] = (0.0, 0.0, 0.0)
) -> tuple[PackedSequences, list[Tensor]]:
    """The layout, and each operand with every sample on a multiple of 16 after `gap` steps of rows
    that are all its `junk`, a number or a row."""
    lengths, starts, end = [len(sample[0]) for sample in samples], [], 0
    for length in lengths:
        starts.append(end + gap * STEP)
        end = starts[-1] + -(-length // STEP) * STEP
    operands = [x.new_empty((end, *x.shape[1:])) for x in samples[0]]
    for i, (operand, value) in enumerate(zip(operands, junk, strict=True)):
        operand[:] = value
        for start, length, sample in zip(starts, lengths, samples, strict=True):
            operand[start : start + length] = sample[i]
    return PackedSequences.of(starts, lengths), operands


def _compare(
    tally: Tally, case: str, members: Sequence[int], alone: Sequence[Tensor], found: list[Tensor]
) -> None:
    for i, rows in zip(members, found, strict=True):
        tally.equal(case, alone[i], rows, lambda row, i=i: f"sample {i} position {row}")
