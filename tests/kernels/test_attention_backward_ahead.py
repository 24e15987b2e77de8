"""The backward pass whose steps begin the next one's scores: its order of programs, where a chain
lies, and that no variant of it moves a byte."""

import itertools

import pytest
import torch

from rl_consistency.kernels import attention_backward_hopper
from rl_consistency.kernels.attention_backward_ahead import (
    QUERIES,
    Variant,
    _chain_layout,
    attention_ahead_bwd,
    tiles_apart,
)
from rl_consistency.kernels.attention_backward_triton import attention_bwd
from rl_consistency.kernels.attention_layout import PackedSequences
from rl_consistency.kernels.attention_schedules import FIVE_PRODUCTS, admits
from rl_consistency.kernels.attention_triton import attention_fwd

VARIANTS = [
    Variant(ahead=ahead, fetched=fetched, left=left, first=first, stages=stages)
    for ahead, fetched, left, first, stages in itertools.product(
        (True, False), (True, False), (True, False), (True, False), (2, 3)
    )
    if stages == 2 or not left
]


def test_only_programs_that_wait_for_one_another_are_set_apart():
    eight = PackedSequences.of([0, 2048], [2048, 2048])
    assert tiles_apart(eight, 8, 1.25, 132) == 1.25 * 132 / 16
    assert tiles_apart(eight, 40, 1.25, 132) == 0.0


@pytest.mark.parametrize("dim", [64, 128])
def test_shared_memory_holds_a_chain_as_threads_and_memory_do(dim):
    bases = _chain_layout.fn(dim).offset_bases
    assert 1 << len(bases) == QUERIES.value * dim
    for offset in range(QUERIES.value * dim):
        chosen = [basis for i, basis in enumerate(bases) if offset >> i & 1]
        row, column = (sum(basis[axis] for basis in chosen) for axis in (0, 1))
        # A thread's first sum is where `_own_place` says, the others as `_store_chain` has them.
        warp = column // (dim // 2) * 4 + row // 16
        place = warp * (8 * dim) + row % 8 * 16 + column % 8 // 2 * 4
        group = column % (dim // 2) // 8
        assert offset == place + group * 128 + row // 8 % 2 * 2 + column % 2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_variant_gives_the_same_bytes(variant, window, monkeypatch):
    lens = [1000, 1, 129, 640]
    layout = PackedSequences.of([0, 1008, 1024, 1168], lens)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1808, heads, 128, device="cuda", generator=generator).bfloat16()
        for heads in (8, 4, 4, 8)
    )
    if not admits(FIVE_PRODUCTS, layout, do, q, k, v):
        pytest.skip("needs sm_90")
    scale = 128**-0.5
    out, lse = attention_fwd(q, k, v, layout, scale, window)
    operands = (do, q, k, v, out, lse, layout, scale, window)
    expected = attention_bwd(*operands, key_schedule=FIVE_PRODUCTS)

    def ahead(*given):
        attention_ahead_bwd(*given, variant=variant)

    monkeypatch.setattr(attention_backward_hopper, "attention_hopper_bwd", ahead)
    got = attention_bwd(*operands, key_schedule=FIVE_PRODUCTS)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
