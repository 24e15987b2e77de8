"""How much of a weight is asked for ahead of time."""

import pytest

from rl_consistency.kernels.core.prefetch import LINE, PREFETCHED_BYTES, prefetched_columns


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("element_size", [2, 4])
def test_a_program_asks_for_so_many_bytes_in_whole_lines(rows, weights, element_size):
    columns = prefetched_columns(rows, 1 << 20, element_size, weights)
    assert columns * rows * weights * element_size == PREFETCHED_BYTES
    assert columns * element_size % LINE.value == 0


def test_narrow_weights_are_asked_for_whole_and_tall_tiles_for_one_line():
    assert prefetched_columns(16, 80, 2) == 128  # the next power of two
    assert prefetched_columns(16, 1, 2) == 64
    assert prefetched_columns(1024, 4096, 2) == 64
