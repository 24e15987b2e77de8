from functools import partial

import pytest
import torch

from rl_consistency.cases.case import Heads
from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention import cpu as attention_module
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import (
    attention_reference,
    attention_varlen,
)
from rl_consistency.verify.checks.attention import (
    attention_probe,
    chunked,
    decoded,
    packed_gradients,
    paged_alike,
    sequences_alike,
)
from rl_consistency.verify.laws import judged
from rl_consistency.verify.sweep import OpSetup
from tests.comparison import assert_within, first_difference

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


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 20, 70])
def test_windows_and_groups_of_heads_match_fp64(window, heads, kv_heads):
    results, _ = attend(range(len(LENGTHS)), heads, kv_heads, window=window)
    for i, ours in results.items():
        q, k, v, do = (t.double() for t in sequence(i, heads, kv_heads))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        exact = attention_reference(*leaves, scale=SCALE, window=window)
        exact.backward(do)
        assert_within(ours["o"], exact, "attention", torch.float32)
        for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
            # A lone token's dq and dk are zero but for rounding, hence the floor on the norm.
            error = (ours[name].double() - leaf.grad).norm() / leaf.grad.norm().clamp(min=1.0)
            assert error < 1e-4


def test_lse_is_the_log_normalizer_of_the_scores():
    results, _ = attend([4])
    q, k, _, _ = (t.double() for t in sequence(4, 4, 2))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) * SCALE
    hidden = torch.arange(LENGTHS[4])[:, None] < torch.arange(LENGTHS[4])
    exact = scores.masked_fill(hidden[:, None, :], -torch.inf).logsumexp(-1)
    assert_within(results[4]["lse"], exact, "attention", torch.float32)


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


@pytest.mark.parametrize("threads", [1, 3])
def test_decode_equals_prefill_at_any_thread_count(threads):
    shape, plan = Heads(4, 2, D), ("chunk 7", 16, [4], partial(chunked, chunk=7))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        samples = attention_probe(shape, LENGTHS, OpSetup(dtype=torch.float32))
        assert judged(paged_alike, shape, samples, [plan]).passed
        assert not differing(attend([4])[0], attend([3, 4, 5])[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("gather_bytes", [1, 1 << 14])
def test_how_many_keys_are_gathered_at_a_time_does_not_matter(gather_bytes, monkeypatch):
    whole, _ = attend(range(len(LENGTHS)))
    monkeypatch.setattr(attention_module, "GATHER_BYTES", gather_bytes)
    assert not differing(attend(range(len(LENGTHS)))[0], whole)


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
