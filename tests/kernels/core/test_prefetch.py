"""How much of a weight is asked for ahead of time."""

import pytest
import torch
import triton
import triton.language as tl

from rl_consistency.kernels.core import prefetch
from rl_consistency.kernels.core.prefetch import LINE, PREFETCHED_BYTES, prefetched_columns


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("element_size", [2, 4])
def test_a_program_asks_for_so_many_bytes_in_whole_lines(rows, weights, element_size):
    columns = prefetched_columns(rows, 1 << 20, element_size, weights)
    assert columns * rows * weights * element_size == PREFETCHED_BYTES
    assert columns * element_size % LINE.value == 0


@triton.jit
def ask(ptr, first, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    prefetch.prefetch_rows(ptr, first, num_rows, num_columns, stride, ROWS, COLUMNS)


@pytest.mark.parametrize("first", [0, 16, 32])
@pytest.mark.parametrize("shape, columns", [((40, 320), 128), ((40, 60), 128), ((20, 640), 512)])
def test_lines_of_a_tile_are_asked_for_and_none_outside_the_weight(
    first, shape, columns, monkeypatch
):
    """The interpreter, with a list of pointers in the place of the instruction."""
    asked = []
    monkeypatch.setattr(
        prefetch, "prefetch_lines", lambda pointers: asked.extend(pointers.handle.data.flatten())
    )
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    ask[(1,)](weight, first, *shape, weight.stride(0), ROWS=16, COLUMNS=columns)
    places = {(int(pointer) - weight.data_ptr()) // 2 for pointer in asked}
    rows = {min(row, shape[0] - 1) for row in range(first, first + 16)}
    own = {min(column, shape[1] - 1) for column in range(0, columns, 64)}
    assert places == {row * shape[1] + column for row in rows for column in own}
