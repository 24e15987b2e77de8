"""Expected microseconds of a product, from which `schedules` picks where nothing was measured.

Tiles are dealt out to the multiprocessors. The busiest one sets the pace, and its loops partly hide
the way of the operands from memory. The figures are those of an H200: least squares of the log of
expected by measured time, over half of the shapes of `benchmarks/tune/random_h200.json`. The other
half judges them, in tests/kernels/matmul/test_pick_quality.py. On another GPU they may cost speed.
"""

from __future__ import annotations

from math import hypot

from rl_consistency.kernels.core.grid import cdiv

PROCESSORS = 132
"""Multiprocessors of an H100 or H200; assumed of every GPU."""

MEMORY = 3.33e6
"""Bytes from memory in a microsecond."""

OPERAND_BYTES = 2
"""Bytes of one element in bf16 and fp16. Products in fp32 are not picked by cost."""

TILE_US = 0.9
"""Filling the pipeline of a tile and storing the result."""

LAUNCH_US, OVERLAPPED_LAUNCH_US = 2.0, 1.3
"""Starting a kernel after the previous one, or while that still runs."""

STEP_US = {
    "tma-128x256x64-w8-s4-persistent-split": 0.653,
    "tma-128x256x64-w8-s3-persistent-split": 0.655,
    "tma-128x128x64-w8-s4-persistent": 0.364,
    "tma-128x128x64-w4-s4-persistent": 0.354,
    "tma-128x128x128-w8-s3": 0.777,
    "tma-128x128x64-w4-s3": 0.381,
    "tma-64x128x64-w4-s4": 0.227,
    "tma-64x128x128-w4-s4": 0.419,
    "tma-64x256x64-w4-s4": 0.377,
    "tma-64x64x128-w4-s5": 0.294,
    "tma-16x32x256-w4-s6": 0.430,
    "tma-16x32x256-w4-s6-overlap": 0.445,
    "tma-16x64x128-w4-s4": 0.247,
    "tma-16x64x128-w4-s4-overlap": 0.282,
    "tma-16x64x128-w4-s6-swap-overlap": 0.186,
    "tma-16x64x256-w4-s4-swap": 0.342,
    "tma-16x64x256-w4-s4-swap-overlap": 0.340,
    "tma-16x128x64-w4-s6-swap-overlap": 0.161,
    "tma-16x128x128-w4-s4-swap-overlap": 0.335,
    "tma-32x64x128-w4-s4": 0.306,
    "tma-32x64x128-w4-s6-swap": 0.203,
    "tma-32x64x128-w4-s6-swap-overlap": 0.203,
    "tma-32x64x256-w4-s4-swap": 0.399,
    "tma-32x64x256-w4-s4-swap-overlap": 0.393,
    "tma-32x128x128-w4-s4-swap": 0.361,
    "tma-64x16x256-w4-s4-overlap": 0.400,
    "tma-64x32x256-w4-s4-overlap": 0.470,
    "tma-64x64x128-w4-s6-swap": 0.275,
    "tma-64x64x128-w4-s6-swap-overlap": 0.279,
    "tma-64x128x128-w4-s4-swap": 0.443,
    "tma-64x128x128-w4-s4-swap-overlap": 0.447,
}
"""Schedule by descriptor -> one step of K in a multiprocessor's tile. Where several programs share
a multiprocessor, a step takes so long for each of them."""

LIBRARY_TILES = tuple((m, n) for m in (64, 128, 256) for n in (64, 128, 256) if m * n <= 128 * 256)
"""Tiles that the vendor library may choose; it is expected to choose the best."""

LIBRARY_BLOCK_K = 64
LIBRARY_STEP_US = 0.32 / (128 * 128)
"""One step of K of one element of the result."""

LIBRARY_LAUNCH_US = 2.4

FEW_ROWS, MORE_ROWS = 64, 128
"""Up to FEW_ROWS the library must promise much, since each new weight and number of rows costs a
certificate. Up to MORE_ROWS it was up to 16 times slower than expected at some narrow weights."""

NARROW = 2048
"""Columns of a weight that the library never gets for up to MORE_ROWS rows."""

GAIN, DOUBT = 0.9, 1.05
"""The library is preferred below this share of the best schedule's time, for up to FEW_ROWS and for
more. For more rows a schedule must promise 5 %, since its figure is the more doubtful one."""


def schedule_us(
    name: str, blocks: tuple[int, int, int], overlap: bool, m: int, n: int, k: int
) -> float:
    """Microseconds of a schedule of `STEP_US`, with its blocks (M, N, K), for [m, k] times [k, n];
    KeyError for another schedule."""
    launch_us = OVERLAPPED_LAUNCH_US if overlap else LAUNCH_US
    return launch_us + _tiled_us(m, n, k, blocks, STEP_US[name])


def library_us(m: int, n: int, k: int) -> float:
    """Microseconds of the vendor library's product without split K."""
    return LIBRARY_LAUNCH_US + min(
        _tiled_us(m, n, k, (*tile, LIBRARY_BLOCK_K), tile[0] * tile[1] * LIBRARY_STEP_US)
        for tile in LIBRARY_TILES
    )


def library_is_faster(m: int, n: int, k: int, schedule_us: float) -> bool:
    """Whether the library is preferred to a schedule that is expected to take `schedule_us`."""
    if m <= MORE_ROWS and n < NARROW:
        return False
    return library_us(m, n, k) < schedule_us * (GAIN if m <= FEW_ROWS else DOUBT)


def _tiled_us(m: int, n: int, k: int, blocks: tuple[int, int, int], step_us: float) -> float:
    block_m, block_n, block_k = blocks
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    busiest = cdiv(tiles, PROCESSORS) * (cdiv(k, block_k) * step_us + TILE_US)
    return hypot(busiest, OPERAND_BYTES * (m * k + n * k + m * n) / MEMORY)
