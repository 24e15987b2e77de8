"""Keys and values land in their slots, bit for bit: by torch on a CPU, and by the kernel."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.paged_cache_triton import (
    MAX_COLUMNS,
    cache_write,
    cache_write_fwd,
    zero_cache,
)
from rl_consistency.parity.bytes import same_bytes

HAS_GPU = torch.cuda.is_available()
WRITERS = [cache_write] if HAS_GPU else [cache_write, cache_write_fwd]


def stored_by_head(cache):
    """The same cache, the tokens of one head side by side in memory."""
    return cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def call(dtype=torch.float32, tokens=5, heads=2, head_dim=24, by_head=False):
    k, v = probe((2 * tokens, heads, head_dim), dtype).split(tokens)
    caches = [probe((4, 3, heads, head_dim), dtype, seed=i) for i in (1, 2)]
    caches = [stored_by_head(cache) if by_head else cache for cache in caches]
    return k, v, *caches, torch.tensor([7, 0, 11, 3, 5])[:tokens]


def written(k, v, key_cache, value_cache, slots):
    expected = key_cache.clone(), value_cache.clone()
    for cache, new in zip(expected, (k, v)):
        for token, slot in enumerate(slots.tolist()):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("by_head", [False, True])
def test_every_token_is_copied_to_its_slot_and_nothing_else_changes(by_head, write, dtype):
    k, v, key_cache, value_cache, slots = call(dtype, by_head=by_head)
    k[0, 0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
    expected = written(k, v, key_cache, value_cache, slots)
    write(k, v, key_cache, value_cache, slots)
    assert same_bytes(key_cache, expected[0]) and same_bytes(value_cache, expected[1])


@pytest.mark.parametrize("write", WRITERS)
def test_new_tokens_may_have_any_strides(write):
    k, v, key_cache, value_cache, slots = call(head_dim=16)
    expected = written(k, v, key_cache, value_cache, slots)
    k = torch.stack([k, k + 1], dim=2)[:, :, 0]
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    write(k, v, key_cache, value_cache, slots.repeat_interleave(2)[::2])
    assert same_bytes(key_cache, expected[0]) and same_bytes(value_cache, expected[1])


@pytest.mark.parametrize("write", WRITERS)
def test_a_token_wider_than_a_program_is_copied_in_parts(write):
    heads = MAX_COLUMNS // 128 + 3
    k, v, key_cache, value_cache, slots = call(tokens=2, heads=heads, head_dim=128)
    expected = written(k, v, key_cache, value_cache, slots)
    write(k, v, key_cache, value_cache, slots)
    assert same_bytes(key_cache, expected[0]) and same_bytes(value_cache, expected[1])


@pytest.mark.parametrize("write", WRITERS)
def test_no_tokens_change_nothing(write):
    k, v, key_cache, value_cache, slots = call()
    before = key_cache.clone()
    write(k[:0], v[:0], key_cache, value_cache, slots[:0])
    assert same_bytes(key_cache, before)


def test_caches_without_one_distance_between_slots_are_refused():
    k, v, key_cache, _, slots = call()
    gaps = key_cache.new_zeros(4, 5, 2, 24)[:, :3]
    with pytest.raises(ValueError, match="one distance between slots"):
        cache_write(k, v, gaps, gaps, slots)


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


def test_the_comparison_notices_a_wrong_slot():
    """Negative control."""
    k, v, key_cache, value_cache, slots = call()
    expected = written(k, v, key_cache, value_cache, slots)
    cache_write(k, v, key_cache, value_cache, slots.roll(1))
    assert not same_bytes(key_cache, expected[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(5, 2, 8)}, r"k \(5, 2, 8\), v \(5, 2, 24\).* k and v are \[T, Hkv, D\]"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slots \(4,\)"),
        ({"value_cache": torch.zeros(4, 3, 2, 8)}, "the caches"),
        ({"value_cache": torch.zeros(4, 3, 2, 24).bfloat16()}, "one dtype and one device"),
        (
            {"key_cache": torch.zeros(4, 3, 24, 2).transpose(2, 3)},
            "equal, with dense heads",
        ),
        ({"key_cache": stored_by_head(torch.zeros(4, 3, 2, 24))}, "must be equal"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    names = ("k", "v", "key_cache", "value_cache", "slots")
    with pytest.raises(ValueError, match=message):
        cache_write(**(dict(zip(names, call())) | change))
