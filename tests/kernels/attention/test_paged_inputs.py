"""One launch gives queries, keys and the cache the bytes of norm, rotation and write."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.attention.paged_cache_triton import (
    HeadNorms,
    cache_write,
    cache_write_fwd,
    paged_inputs,
    paged_inputs_fwd,
)
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_fwd, rotary_table
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_fwd
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.parity.bytes import same_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(4, 2, 16), (14, 2, 64), (3, 3, 80), (1, 1, 96), (16, 8, 128), (9, 3, 256)]


def call(heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16, tokens=5, normed=True, by_head=False):
    """(q, k, v, cos, sin, norms, key cache, value cache, slots)."""
    sizes = heads * dim, kv_heads * dim, kv_heads * dim
    joined = probe((tokens, sum(sizes)), dtype).to(DEVICE)
    q, k, v = (x.view(tokens, -1, dim) for x in joined.split(sizes, dim=1))
    inv_freq = 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    cos, sin = rotary_table(inv_freq, 64)[:, 3 : 3 + tokens].to(DEVICE)
    weights = [1 + probe((dim,), dtype, seed=s).to(DEVICE) / 8 for s in (1, 2)]
    norms = HeadNorms(*weights, 1e-6, 1e-5) if normed else None
    caches = [probe((4, 3, kv_heads, dim), dtype, seed=s).to(DEVICE) for s in (3, 4)]
    if by_head:  # the tokens of one head side by side in memory
        caches = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in caches]
    slots = torch.tensor([7, 0, 11, 3, 5], device=DEVICE)[:tokens]
    return q, k, v, cos, sin, norms, *caches, slots


def apart(q, k, v, cos, sin, norms, key_cache, value_cache, slots):
    """Everything that the fused op gives, by the separate ops."""
    caches = key_cache.clone(), value_cache.clone()
    if norms is not None:
        q = rms_norm(q, norms.q_weight, norms.q_eps)
        k = rms_norm(k, norms.k_weight, norms.k_eps)
    q, k = rotary(q, k, cos, sin)
    cache_write(k, v, *caches, slots)
    return q, k, *caches


def apart_by_kernels(q, k, v, cos, sin, norms, key_cache, value_cache, slots):
    """The same by the kernels of the separate ops, whose norms have another tree than a CPU's."""
    caches = key_cache.clone(), value_cache.clone()
    if norms is not None:
        q, *_ = rms_norm_fwd(q, None, norms.q_weight, norms.q_eps)
        k, *_ = rms_norm_fwd(k, None, norms.k_weight, norms.k_eps)
    q, k = rotary_fwd(q, k, cos, sin, False)
    cache_write_fwd(k, v, *caches, slots)
    return q, k, *caches


def paged(key_cache, value_cache, slots):
    """A layout of as many sequences of one token as there are slots."""
    count = len(slots)
    return PagedAttention(
        query_starts=list(range(count)), query_lens=[1] * count, context_lens=[1] * count,
        block_tables=[[0]] * count, slot_mapping=slots, key_cache=[key_cache],
        value_cache=[value_cache], block_size=key_cache.shape[1],
    )  # fmt: skip


def fused(*operands):
    """The same by `paged_inputs`."""
    *tensors, norms, key_cache, value_cache, slots = operands
    layout = paged(key_cache, value_cache, slots)
    return *paged_inputs(*tensors, layout, 0, norms=norms), key_cache, value_cache


def by_kernel(*operands):
    return *paged_inputs_fwd(*operands), *operands[6:8]


RUNS = [fused] if DEVICE == "cuda" else [fused, by_kernel]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("run", RUNS)
def test_the_fused_op_gives_the_bytes_of_the_separate_ones(run, normed, heads, dtype):
    operands = call(*heads, dtype, normed=normed)
    expected = (apart_by_kernels if run is by_kernel else apart)(*operands)
    assert all(map(same_bytes, run(*operands), expected))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("run", RUNS)
def test_it_does_not_matter_how_the_heads_of_the_cache_lie(run, heads):
    found = [run(*call(*heads, by_head=by_head)) for by_head in (False, True)]
    assert all(map(same_bytes, *found))
    assert found[0][2].stride() != found[1][2].stride() or heads[1] == 1


@pytest.mark.parametrize("run", RUNS)
def test_a_token_does_not_depend_on_its_neighbours(run):
    operands = call(14, 2, 64)
    *tensors, norms, key_cache, value_cache, slots = operands
    alone = (*(x[2:3] for x in tensors), norms, key_cache.clone(), value_cache.clone(), slots[2:3])
    q, k, *_ = run(*alone)
    both = run(*operands)
    assert same_bytes(q, both[0][2:3]) and same_bytes(k, both[1][2:3])


def test_the_kernel_without_its_rounding_between_norm_and_rotation_is_noticed():
    """Negative control: one rounding less gives other bytes."""
    q, k, v, cos, sin, norms, *rest = call(14, 2, 64)
    expected, *_ = apart(q, k, v, cos, sin, norms, *rest)
    normed = rms_norm(q.float(), norms.q_weight.float(), norms.q_eps)
    unrounded, _ = rotary(normed, normed, cos, sin)
    assert not same_bytes(unrounded.to(q.dtype), expected)


@pytest.mark.parametrize("run", RUNS)
def test_no_token_changes_nothing(run):
    q, k, v, cos, sin, norms, key_cache, value_cache, slots = call()
    none = (x[:0] for x in (q, k, v, cos, sin))
    operands = (*none, norms, key_cache, value_cache, slots[:0])
    expected = apart(*operands)
    assert all(map(same_bytes, run(*operands), expected))


def test_operands_that_do_not_fit_are_refused():
    q, k, v, cos, sin, norms, key_cache, value_cache, slots = call()
    layout = paged(key_cache, value_cache, slots)
    with pytest.raises(ValueError, match="cos"):
        paged_inputs(q, k, v, cos[:3], sin, layout, 0, norms=norms)
    with pytest.raises(ValueError, match="cache_write"):
        paged_inputs(q, k, v[:, :1], cos, sin, layout, 0, norms=norms)
    with pytest.raises(ValueError, match="does not fit"):
        wrong = norms._replace(k_weight=norms.k_weight[:8])
        paged_inputs(q, k, v, cos, sin, layout, 0, norms=wrong)
    with pytest.raises(ValueError, match="computes no gradients"):
        paged_inputs(q.requires_grad_(), k, v, cos, sin, layout, 0, norms=norms)


def test_rows_of_any_strides_are_read():
    operands = call(6, 2, 32)
    expected = apart(*operands)
    q, k, v, *rest = operands
    strided = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    assert all(map(same_bytes, fused(*strided, *rest), expected))
