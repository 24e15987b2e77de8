"""The backward pass in five products: its memory, its order of programs, and where a chain lies.
Its bytes are compared in tests/gpu."""

import pytest
import torch

from rl_consistency.kernels.attention.hopper.backward import (
    QUERIES,
    ROW,
    chain_layout,
    empty_chains,
)
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import chain_bytes


def test_sums_of_dq_take_no_memory_where_one_tile_of_keys_holds_every_sequence():
    assert chain_bytes(PackedSequences.of([0, 128], [128, 1]), 4, 64) == 0
    assert chain_bytes(PackedSequences.of([0, 144], [129, 1]), 4, 64) == 4 * (3 + 1) * 64 * 4 * 64
    assert chain_bytes(PackedSequences.of([], []), 4, 64) == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lens", [[1], [129, 0, 1], [128, 64]])
def test_boxes_of_the_chains_are_a_tile_and_all_tiles_fit(dim, lens):
    layout = PackedSequences.of([sum(lens[:i]) for i in range(len(lens))], lens)
    chains, descriptor = empty_chains(layout, 2, dim, torch.device("cpu"))
    assert len(chains) % (QUERIES.value * dim // ROW.value) == 0 and chains.is_contiguous()
    assert descriptor.block_shape == [QUERIES.value * dim // ROW.value, ROW.value]
    assert descriptor.shape == list(chains.shape)
    assert chains.numel() * 4 == (chain_bytes(layout, 2, dim) or 4 * QUERIES.value * dim)


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_shared_memory_holds_a_chain_as_threads_do(dim):
    """Neighbouring lanes hold 16 bytes each, side by side: no two of a warp in one bank."""
    bases = chain_layout.fn(dim).offset_bases
    assert 1 << len(bases) == QUERIES.value * dim
    for offset in range(QUERIES.value * dim):
        chosen = [basis for i, basis in enumerate(bases) if offset >> i & 1]
        row, column = (sum(basis[axis] for basis in chosen) for axis in (0, 1))
        # Where the matrix units hold it: eight warps, four along rows and two along columns.
        warp = column // (dim // 2) * 4 + row // 16
        lane = row % 8 * 4 + column % 8 // 2
        group = column % (dim // 2) // 8
        within = row // 8 % 2 * 2 + column % 2
        assert offset == warp * (8 * dim) + group * 128 + lane * 4 + within
