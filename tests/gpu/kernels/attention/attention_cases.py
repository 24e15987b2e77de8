"""Sequences, packed and in a paged cache, and what attention gives for them on a GPU."""

from dataclasses import dataclass
from functools import cache

import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.attention.paged_cache_triton import zero_cache
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.checks.attention import SCORE_SCALE
from tests.kernels.attention import layouts

DEVICE = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (4096, 1, 129, 700, 250)
LONG = LENGTHS[0]
EDGES = (0, 1, 127, 128, 129, 255, 256, 2047, 2048, 4095)
"""Positions at which a block of keys, or a part of the context, begins or ends."""
BLOCK = 16
"""Tokens in a block of the cache."""


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for."""

    dtype: torch.dtype
    dim: int
    window: int | None = None
    heads: int = 4
    kv_heads: int = 2

    @property
    def options(self):
        return {"scale": self.dim**-0.5, "window": self.window}


MAIN = Case(BF16, 128)
WINDOWED = Case(BF16, 128, 300)


def all_same(one, other):
    return all(map(same_bytes, one, other))


def together(calls):
    """The results of some calls, whose kernels are compiled side by side beforehand."""
    compile_ahead(calls)
    return [call() for call in calls]


def name(case):
    return f"{str(case.dtype)[6:]}-{case.dim}-{case.window}"


def drawn(case, length, seed):
    """q, k, v and a cotangent. Values are small: where two large ones cancel, the rounding of the
    probabilities to 16 bits would exceed any tolerance."""
    sizes = [(case.heads, SCORE_SCALE), (case.kv_heads, SCORE_SCALE), (case.kv_heads, 0.001)]
    return [
        probe((length, heads, case.dim), case.dtype, seed=seed + j, scale=scale).to(DEVICE)
        for j, (heads, scale) in enumerate([*sizes, (case.heads, 0.1)])
    ]


@cache
def sequence(case, i):
    """q, k, v and a cotangent of sequence i; it depends on nothing else."""
    return drawn(case, LENGTHS[i], 10 * i)


def packed(case, members, gap=0, junk=0.0):
    """q, k, v and a cotangent of some sequences with `gap` rows of junk between, and the layout."""
    starts, end = [], gap
    for i in members:
        starts.append(end)
        end += -(-LENGTHS[i] // 16) * 16 + gap
    wholes = [torch.full_like(t[:1], junk).repeat(end, 1, 1) for t in sequence(case, 0)]
    for i, start in zip(members, starts, strict=True):
        for whole, part in zip(wholes, sequence(case, i), strict=True):
            whole[start : start + LENGTHS[i]] = part
    return *wholes, PackedSequences.of(starts, [LENGTHS[i] for i in members])


def by_sequence(members, layout, tensors):
    """{sequence: its rows of each tensor}."""
    return {
        i: [t[start : start + LENGTHS[i]] for t in tensors]
        for i, start in zip(members, layout.query_starts, strict=True)
    }


def attend(case, members, **placement):
    """{sequence: (o, lse)} of one packed call."""
    q, k, v, _, layout = packed(case, members, **placement)
    return by_sequence(members, layout, attention_varlen(q, k, v, layout, **case.options))


def gradients(case, members, **placement):
    """{sequence: (dq, dk, dv)} of one packed call."""
    q, k, v, do, layout = packed(case, members, **placement)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attention_varlen(*leaves, layout, **case.options)[0].backward(do)
    return by_sequence(members, layout, [leaf.grad for leaf in leaves])


@cache
def among(case):
    """{sequence: (o, lse)} of all sequences in one call."""
    return attend(case, range(len(LENGTHS)))


@cache
def cached_keys(case, block_size=BLOCK):
    """The long sequence's keys and values in scattered blocks, NaN elsewhere, and the table."""
    blocks = -(-LONG // block_size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(blocks + 3, generator=generator)[:blocks]
    positions = torch.arange(LONG)
    slots = table[positions // block_size] * block_size + positions % block_size
    caches = []
    for part in sequence(case, 0)[1:3]:
        size = blocks + 3, block_size, case.kv_heads, case.dim
        cache_ = zero_cache(*size, dtype=part.dtype, device=part.device).fill_(torch.nan)
        cache_.view(-1, case.kv_heads, case.dim)[slots.to(DEVICE)] = part
        caches.append(cache_)
    return *caches, table.tolist()


def paged_layout(spans, key_cache, value_cache, table):
    lens = [end - start for start, end in spans]
    return layouts.paged(
        [end for _, end in spans],
        query_starts=[sum(lens[:i]) for i in range(len(lens))],
        query_lens=lens,
        block_tables=[table] * len(spans),
        **of_cache(sum(lens), key_cache, value_cache),
    )


def of_cache(rows, key_cache, value_cache):
    """The fields of a layout that say where keys and values lie; no new ones are written."""
    return {
        "slot_mapping": torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        "key_cache": [key_cache],
        "value_cache": [value_cache],
        "block_size": key_cache.shape[1],
    }


def paged(case, spans, keys=None, **choice):
    """(o, lse) of queries start .. end of the long sequence, all spans in one call."""
    layout = paged_layout(spans, *(keys or cached_keys(case)))
    q = torch.cat([sequence(case, 0)[0][start:end] for start, end in spans])
    if not choice:
        return attention_paged(q, layout, 0, **case.options)
    k, v = (c[0].view(-1, case.kv_heads, case.dim) for c in (layout.key_cache, layout.value_cache))
    o, lse = attention_fwd(q, k, v, layout, *case.options.values(), **choice)
    return o, lse.float()


def decoded(case, **choice):
    """(o, lse) at the edges, every position a sequence of its own."""
    return paged(case, [(p, p + 1) for p in EDGES], **choice)


def at_edges(tensors):
    return [t[list(EDGES)] for t in tensors]
