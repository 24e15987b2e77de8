from functools import partial

import pytest
import torch

from rl_consistency.cases.case import Heads
from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention import cpu as attention_module
from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention
from rl_consistency.kernels.attention.op import (
    attention_paged,
    attention_reference,
    attention_varlen,
)
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.digest import first_difference
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.checks.attention import (
    attention_probe,
    packed_gradients,
    paged_alike,
    sequences_alike,
)
from rl_consistency.verify.checks.paged_calls import chunked, decoded
from rl_consistency.verify.laws import judged
from rl_consistency.verify.sweep import OpSetup

LENGTHS = (1, 5, 64, 65, 130, 33)
D = 32
SCALE = D**-0.5
HEADS = ((4, 4), (4, 2), (6, 2), (4, 1))
"""(query heads, KV heads); a group of 3 does not divide a tile of 16 rows."""


ARRANGEMENTS = (
    ("together", [range(len(LENGTHS))]),
    ("permuted batch", [[5, 2, 0, 4, 1, 3]]),
    ("other neighbours", [[4, 3], [2, 3, 5], [3, 4, 1]]),
)


def sequence(i, heads, kv_heads, dtype=torch.float32):
    """q, k, v and a cotangent of sequence i; it depends on nothing else."""
    n = LENGTHS[i]
    return [
        probe((n, h, D), dtype, seed=10 * i + j, scale=s)
        for j, (h, s) in enumerate([(heads, 0.4), (kv_heads, 0.4), (kv_heads, 0.01), (heads, 1.0)])
    ]


def attend(members, heads=4, kv_heads=2, *, dtype=torch.float32, gap=0, window=None, junk=0.0):
    """Outputs and gradients of each member of one packed call, by sequence number."""
    starts, row = [], gap
    for i in members:
        starts.append(row)
        row += -(-LENGTHS[i] // 16) * 16 + gap
    packed = [
        torch.full((row, h, D), junk, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)
    ]
    for i, start in zip(members, starts, strict=True):
        for whole, part in zip(packed, sequence(i, heads, kv_heads, dtype), strict=True):
            whole[start : start + LENGTHS[i]] = part
    q, k, v, do = packed
    leaves = [t.requires_grad_() for t in (q, k, v)]
    layout = PackedSequences.of(starts, [LENGTHS[i] for i in members])
    o, lse = attention_varlen(*leaves, layout, scale=SCALE, window=window)
    o.backward(do)
    values = {"o": o.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    by_sequence = {
        i: {name: t[start : start + LENGTHS[i]] for name, t in values.items()}
        for i, start in zip(members, starts, strict=True)
    }
    owned = torch.zeros(row, dtype=torch.bool)
    for i, start in zip(members, starts, strict=True):
        owned[start : start + LENGTHS[i]] = True
    return by_sequence, {name: t[~owned] for name, t in values.items()}


def differing(one, other):
    """Sequences whose bytes differ between two calls."""
    return [i for i in one.keys() & other.keys() if first_difference(one[i], other[i])]


def paged_outputs(
    i, chunk, *, block_size=16, window=None, heads=4, kv_heads=2, dtype=torch.float32
):
    """Sequence i through a paged cache with shuffled blocks, `chunk` new tokens a call."""
    q, k, v, _ = sequence(i, heads, kv_heads, dtype)
    n = LENGTHS[i]
    blocks = -(-n // block_size)
    table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(i))[:blocks].tolist()
    caches = [
        [torch.full((blocks + 3, block_size, kv_heads, D), float("nan"), dtype=dtype)] for _ in "kv"
    ]
    parts = []
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        slots = [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
        paged = PagedAttention(
            query_starts=[0],
            query_lens=[stop - start],
            context_lens=[stop],
            block_tables=[table],
            slot_mapping=torch.tensor(slots),
            key_cache=caches[0],
            value_cache=caches[1],
            block_size=block_size,
        )
        paged.write(0, k[start:stop], v[start:stop])
        parts.append(attention_paged(q[start:stop], paged, 0, scale=SCALE, window=window))
    o, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return {"o": o, "lse": lse}


def outputs_of(results):
    return {i: {name: t[name] for name in ("o", "lse")} for i, t in results.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 20, 70])
def test_matches_fp64(window, heads, kv_heads, dtype):
    results, _ = attend(range(len(LENGTHS)), heads, kv_heads, dtype=dtype, window=window)
    for i, ours in results.items():
        q, k, v, _ = sequence(i, heads, kv_heads, dtype)
        exact = attention_reference(q, k, v, scale=SCALE, window=window)
        assert_within(ours["o"], exact, "attention", dtype)


def test_lse_is_the_log_normalizer_of_the_scores():
    results, _ = attend([4])
    q, k, _, _ = (t.double() for t in sequence(4, 4, 2))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) * SCALE
    hidden = torch.arange(LENGTHS[4])[:, None] < torch.arange(LENGTHS[4])
    exact = scores.masked_fill(hidden[:, None, :], -torch.inf).logsumexp(-1)
    assert_within(results[4]["lse"], exact, "attention", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 2)])
def test_gradients_match_fp64(heads, kv_heads, window, dtype):
    results, _ = attend(range(len(LENGTHS)), heads, kv_heads, dtype=dtype, window=window)
    for i, ours in results.items():
        q, k, v, do = (t.double() for t in sequence(i, heads, kv_heads, dtype))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        attention_reference(*leaves, scale=SCALE, window=window).backward(do)
        for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
            # A lone token's dq and dk are zero but for rounding, hence the floor on the norm.
            error = (ours[name].double() - leaf.grad).norm() / leaf.grad.norm().clamp(min=1.0)
            assert error < (1e-4 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("window", [None, 20])
def test_sequences_do_not_depend_on_their_neighbours(window, heads, kv_heads, dtype):
    shape = Heads(heads, kv_heads, D, window)
    samples = attention_probe(shape, LENGTHS, OpSetup(dtype=dtype))
    assert judged(sequences_alike, shape, samples, ARRANGEMENTS).passed
    assert judged(sequences_alike, shape, samples, ARRANGEMENTS, packed_gradients).passed


def test_rows_of_no_sequence_are_zero_and_receive_no_gradient():
    _, filler = attend([1, 5, 3], gap=16, junk=float("nan"))
    for name in ("o", "dq", "dk", "dv"):
        assert not filler[name].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 2)])
def test_decode_and_chunks_equal_prefill(heads, kv_heads, window, dtype):
    shape = Heads(heads, kv_heads, D, window)
    samples = attention_probe(shape, LENGTHS, OpSetup(dtype=dtype))
    everything = list(range(len(LENGTHS)))
    plans = [
        (f"chunk {chunk}, cache blocks of {size}", size, everything, partial(chunked, chunk=chunk))
        for chunk, size in ((1, 16), (7, 3), (64, 64), (1000, 1))
    ]
    plans.append(("decode", 16, everything, decoded))
    assert judged(paged_alike, shape, samples, plans).passed


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_the_cache_block_size_does_not_matter(block_size):
    prefill = outputs_of(attend([4])[0])[4]
    for chunk in (1, 7, 130):
        assert first_difference(paged_outputs(4, chunk, block_size=block_size), prefill) is None


def test_a_decode_batch_equals_single_decodes():
    """One new token of several sequences in one paged call."""
    members = [1, 3, 4]
    k_cache = torch.zeros(40, 16, 2, D)
    v_cache = torch.zeros_like(k_cache)
    tables, queries, expected, block = [], [], [], 0
    for i in members:
        q, k, v, _ = sequence(i, 4, 2)
        blocks = list(range(block, block + -(-len(k) // 16)))
        block = blocks[-1] + 1
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.view(-1, 2, D)[blocks[0] * 16 : blocks[0] * 16 + len(new)] = new
        tables.append(blocks)
        queries.append(q[-1:])
        expected.append(outputs_of(attend([i])[0])[i]["o"][-1:])
    paged = PagedAttention(
        query_starts=[0, 1, 2],
        query_lens=[1, 1, 1],
        context_lens=[LENGTHS[i] for i in members],
        block_tables=tables,
        slot_mapping=torch.zeros(3, dtype=torch.int64),
        key_cache=[k_cache],
        value_cache=[v_cache],
        block_size=16,
    )
    o, _ = attention_paged(torch.cat(queries), paged, 0, scale=SCALE)
    assert same_bytes(o, torch.cat(expected))


@pytest.mark.parametrize("threads", [1, 3])
def test_decode_equals_prefill_at_any_thread_count(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prefill = outputs_of(attend(range(len(LENGTHS)))[0])
        assert first_difference(paged_outputs(4, 7), prefill[4]) is None
        assert not differing(attend([4])[0], attend([3, 4, 5])[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("gather_bytes", [1, 1 << 14])
def test_how_many_keys_are_gathered_at_a_time_does_not_matter(gather_bytes, monkeypatch):
    whole, _ = attend(range(len(LENGTHS)))
    monkeypatch.setattr(attention_module, "GATHER_BYTES", gather_bytes)
    assert not differing(attend(range(len(LENGTHS)))[0], whole)


def test_strides_do_not_matter():
    q, k, v, do = sequence(4, 4, 2)
    layout = PackedSequences.of([0], [LENGTHS[4]])
    results = []
    for strided in (False, True):
        leaves = [
            (
                t.permute(2, 1, 0).contiguous().permute(2, 1, 0) if strided else t.clone()
            ).requires_grad_()
            for t in (q, k, v)
        ]
        o, lse = attention_varlen(*leaves, layout, scale=SCALE)
        o.backward(do)
        results.append({"o": o.detach(), "lse": lse} | {n: t.grad for n, t in zip("qkv", leaves)})
    assert first_difference(*results) is None


def test_no_sequences_give_zeros():
    q, kv = torch.zeros(0, 4, D), torch.zeros(0, 2, D)
    o, lse = attention_varlen(q, kv, kv, PackedSequences.of([], []), scale=SCALE)
    assert o.shape == (0, 4, D) and lse.shape == (0, 4)
    rows = attention_varlen(
        torch.ones(16, 4, D),
        torch.ones(16, 2, D),
        torch.ones(16, 2, D),
        PackedSequences.of([], []),
        scale=SCALE,
    )[0]
    assert not rows.any()


def test_bad_operands_are_refused():
    q, k, v, _ = sequence(4, 4, 2)
    layout = PackedSequences.of([0], [LENGTHS[4]])
    with pytest.raises(ValueError, match="k and v are alike"):
        attention_varlen(q, k, v[1:], layout, scale=SCALE)
    with pytest.raises(ValueError, match="query heads are a multiple of key heads"):
        attention_varlen(q[:, :3], k, v, layout, scale=SCALE)
    with pytest.raises(ValueError, match="head_dim 24; allowed: multiples of 16 up to 256"):
        attention_varlen(q[..., :24], k[..., :24], v[..., :24], layout, scale=SCALE)
    with pytest.raises(ValueError, match="window 0; it must be at least 1"):
        attention_varlen(q, k, v, layout, scale=SCALE, window=0)
    with pytest.raises(ValueError, match="layout reaches row 131 but q has 130 rows"):
        attention_varlen(q, k, v, PackedSequences.of([1], [130]), scale=SCALE)
    with pytest.raises(ValueError, match="q has 130 rows but k has 129"):
        attention_varlen(q, k[1:], v[1:], layout, scale=SCALE)
    with pytest.raises(TypeError, match="k is torch.bfloat16 but q is torch.float32"):
        attention_varlen(q, k.bfloat16(), v, layout, scale=SCALE)
