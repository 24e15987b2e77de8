"""Keys and values land in their slots, bit for bit, by torch on a CPU and by the kernel; and one
launch gives queries, keys and the cache the bytes of norm, rotation and write."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.paged_cache_triton import (
    MAX_COLUMNS,
    HeadNorms,
    cache_write,
    cache_write_fwd,
    paged_inputs,
    paged_inputs_fwd,
    zero_cache,
)
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_fwd, rotary_table
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_fwd
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.attention.layouts import paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRITERS = [cache_write] if DEVICE == "cuda" else [cache_write, cache_write_fwd]
writers = pytest.mark.parametrize("write", WRITERS)


def all_same(one, other):
    return all(map(same_bytes, one, other))


def stored_by_head(cache):
    """The same cache, the tokens of one head side by side in memory."""
    return cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def caches_and_slots(heads, dim, dtype, tokens=5, by_head=False):
    caches = [probe((4, 3, heads, dim), dtype, seed=s).to(DEVICE) for s in (3, 4)]
    caches = [stored_by_head(cache) if by_head else cache for cache in caches]
    return *caches, torch.tensor([7, 0, 11, 3, 5], device=DEVICE)[:tokens]


def new_keys(dtype=torch.float32, tokens=5, heads=2, dim=24, by_head=False):
    """Operands of `cache_write`."""
    k, v = probe((2 * tokens, heads, dim), dtype).to(DEVICE).split(tokens)
    return k, v, *caches_and_slots(heads, dim, dtype, tokens, by_head)


def written(k, v, key_cache, value_cache, slots):
    expected = key_cache.clone(), value_cache.clone()
    for cache, new in zip(expected, (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@writers
@pytest.mark.parametrize("by_head", [False, True])
def test_every_token_is_copied_to_its_slot_and_nothing_else_changes(by_head, write, dtype):
    k, v, *caches, slots = new_keys(dtype, by_head=by_head)
    k[0, 0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
    expected = written(k, v, *caches, slots)
    write(k, v, *caches, slots)
    assert all_same(caches, expected)


@writers
def test_new_tokens_may_have_any_strides(write):
    k, v, *caches, slots = new_keys(dim=16)
    expected = written(k, v, *caches, slots)
    k = torch.stack([k, k + 1], dim=2)[:, :, 0]
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    write(k, v, *caches, slots.repeat_interleave(2)[::2])
    assert all_same(caches, expected)


@writers
@pytest.mark.parametrize("heads, tokens", [(MAX_COLUMNS // 128 + 3, 2), (2, 0)])
def test_tokens_wider_than_a_program_and_no_tokens(write, heads, tokens):
    k, v, *caches, slots = new_keys(tokens=2, heads=heads, dim=128)
    k, v, slots = k[:tokens], v[:tokens], slots[:tokens]
    expected = written(k, v, *caches, slots)
    write(k, v, *caches, slots)
    assert all_same(caches, expected)


def test_the_comparison_notices_a_wrong_slot():
    """Negative control."""
    k, v, *caches, slots = new_keys()
    expected = written(k, v, *caches, slots)
    cache_write(k, v, *caches, slots.roll(1))
    assert not same_bytes(caches[0], expected[0])


@pytest.mark.parametrize(
    ("device", "head_dim", "apart"),
    [("cuda", 64, True), ("cuda", 112, True), ("cuda", 128, False), ("cpu", 64, False)],
)
def test_heads_that_are_narrow_lie_apart_on_a_gpu(device, head_dim, apart, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **kind: zeros(*size, **kind))
    cache = zero_cache(5, 16, 3, head_dim, dtype=torch.bfloat16, device=device)
    assert cache.shape == (5, 16, 3, head_dim) and not cache.any()
    assert cache.is_contiguous() is not apart
    assert cache.stride(0) == 16 * cache.stride(1) and cache.stride(3) == 1


def test_heads_do_not_lie_further_apart_than_kernels_can_count(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *size, **kind: empty(*size, device="meta"))
    small, large = (
        zero_cache(blocks, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
        for blocks in ((1 << 20) - 1, 1 << 20)
    )
    assert not small.is_contiguous() and large.is_contiguous()


GAPS = torch.zeros(4, 5, 2, 24)[:, :3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(5, 2, 8)}, r"k \(5, 2, 8\), v \(5, 2, 24\).* k and v are \[T, Hkv, D\]"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slots \(4,\)"),
        ({"value_cache": torch.zeros(4, 3, 2, 8)}, "the caches"),
        ({"value_cache": torch.zeros(4, 3, 2, 24).bfloat16()}, "one dtype and one device"),
        ({"key_cache": torch.zeros(4, 3, 24, 2).transpose(2, 3)}, "equal, with dense heads"),
        ({"key_cache": stored_by_head(torch.zeros(4, 3, 2, 24))}, "must be equal"),
        ({"key_cache": GAPS, "value_cache": GAPS}, "one distance between slots"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    names = ("k", "v", "key_cache", "value_cache", "slots")
    operands = {name: x.cpu() for name, x in zip(names, new_keys(), strict=True)}
    with pytest.raises(ValueError, match=message):
        cache_write(**(operands | change))


HEADS = [(4, 2, 16), (14, 2, 64), (3, 3, 80), (1, 1, 96), (16, 8, 128), (9, 3, 256)]


def call(heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16, normed=True, by_head=False):
    """(q, k, v, cos, sin, norms, key cache, value cache, slots) of five tokens."""
    sizes = heads * dim, kv_heads * dim, kv_heads * dim
    joined = probe((5, sum(sizes)), dtype).to(DEVICE)
    q, k, v = (x.view(5, -1, dim) for x in joined.split(sizes, dim=1))
    inv_freq = 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    cos, sin = rotary_table(inv_freq, 64)[:, 3:8].to(DEVICE)
    weights = [1 + probe((dim,), dtype, seed=s).to(DEVICE) / 8 for s in (1, 2)]
    norms = HeadNorms(*weights, 1e-6, 1e-5) if normed else None
    return q, k, v, cos, sin, norms, *caches_and_slots(kv_heads, dim, dtype, by_head=by_head)


def apart(q, k, v, cos, sin, norms, key_cache, value_cache, slots, kernels=False):
    """Everything that the fused op gives, by the separate ops, or by their kernels, whose norms
    have another tree than a CPU's."""
    caches = key_cache.clone(), value_cache.clone()
    if norms is not None:
        q, k = (
            rms_norm_fwd(x, None, weight, eps)[0] if kernels else rms_norm(x, weight, eps)
            for x, weight, eps in zip((q, k), norms[:2], norms[2:], strict=True)
        )
    q, k = rotary_fwd(q, k, cos, sin, False) if kernels else rotary(q, k, cos, sin)
    (cache_write_fwd if kernels else cache_write)(k, v, *caches, slots)
    return q, k, *caches


def fused(*operands):
    """The same by `paged_inputs`, each token a sequence."""
    *tensors, norms, key_cache, value_cache, slots = operands
    caches = {"key_cache": [key_cache], "value_cache": [value_cache]}
    layout = paged([1] * len(slots), slot_mapping=slots, block_size=3, **caches)
    return *paged_inputs(*tensors, layout, 0, norms=norms), key_cache, value_cache


def by_kernel(*operands):
    return *paged_inputs_fwd(*operands), *operands[6:8]


runs = pytest.mark.parametrize("run", [fused] if DEVICE == "cuda" else [fused, by_kernel])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [True, False])
@runs
def test_the_fused_op_gives_the_bytes_of_the_separate_ones(run, normed, heads, dtype):
    operands = call(*heads, dtype, normed=normed)
    expected = apart(*operands, kernels=run is by_kernel)
    assert all_same(run(*operands), expected)


@pytest.mark.parametrize("heads", HEADS)
@runs
def test_it_does_not_matter_how_the_heads_of_the_cache_lie(run, heads):
    found = [run(*call(*heads, by_head=by_head)) for by_head in (False, True)]
    assert all_same(*found)
    assert found[0][2].stride() != found[1][2].stride() or heads[1] == 1


@runs
@pytest.mark.parametrize("tokens", [slice(2, 3), slice(0, 0)])
def test_a_token_does_not_depend_on_its_neighbours_and_none_changes_nothing(run, tokens):
    *tensors, norms, key_cache, value_cache, slots = operands = call(14, 2, 64)
    before = key_cache.clone(), value_cache.clone()
    alone = (*(x[tokens] for x in tensors), norms, *(c.clone() for c in before), slots[tokens])
    q, k, *caches = run(*alone)
    both = run(*operands)
    assert same_bytes(q, both[0][tokens]) and same_bytes(k, both[1][tokens])
    assert len(q) or all_same(caches, before)


def test_the_kernel_without_its_rounding_between_norm_and_rotation_is_noticed():
    """Negative control: one rounding less gives other bytes."""
    q, k, v, cos, sin, norms, *rest = call(14, 2, 64)
    expected, *_ = apart(q, k, v, cos, sin, norms, *rest)
    normed = rms_norm(q.float(), norms.q_weight.float(), norms.q_eps)
    unrounded, _ = rotary(normed, normed, cos, sin)
    assert not same_bytes(unrounded.to(q.dtype), expected)


def test_operands_of_the_fused_op_that_do_not_fit_are_refused():
    q, k, v, cos, sin, norms, *rest = call()
    with pytest.raises(ValueError, match="cos"):
        fused(q, k, v, cos[:3], sin, norms, *rest)
    with pytest.raises(ValueError, match="cache_write"):
        fused(q, k, v[:, :1], cos, sin, norms, *rest)
    with pytest.raises(ValueError, match="does not fit"):
        fused(q, k, v, cos, sin, norms._replace(k_weight=norms.k_weight[:8]), *rest)
    with pytest.raises(ValueError, match="computes no gradients"):
        fused(q.requires_grad_(), k, v, cos, sin, norms, *rest)


def test_rows_of_any_strides_are_read():
    q, k, v, *rest = operands = call(6, 2, 32)
    expected = apart(*operands)
    strided = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    assert all_same(fused(*strided, *rest), expected)
