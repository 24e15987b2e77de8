"""One uniform number for each (seed, prompt id, sample index, position), and no state.

The generator is Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
as easy as 1, 2, 3", SC 2011). It is a keyed bijection of a 128-bit counter, so a number is looked
up, not drawn: neither the batch, nor the step, nor the neighbours of a sample can move it.

Key: the 64-bit seed. Counter words, low to high: position, sample index, prompt id (two words).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_WORD = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox-4x32-10 of each row.

    counter [4, n] and key [2, n]: 32-bit words held in uint64, least significant word first.
    Returns [4, n] words of the same kind.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = _MULTIPLIERS[0] * c0  # 32 x 32 bits: exact in 64
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return np.stack([c0, c1, c2, c3])


def uniforms(
    seeds: ArrayLike, prompt_ids: ArrayLike, sample_indices: ArrayLike, positions: ArrayLike
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per row.

    Each argument [n] holds non-negative integers: seeds and prompt ids below 2**64, sample indices
    and positions below 2**32 (a ValueError otherwise). Row i depends on the i-th entries alone.
    """
    seed = _words("seeds", seeds, 64)
    prompt_id = _words("prompt_ids", prompt_ids, 64)
    sample_index = _words("sample_indices", sample_indices, 32)
    position = _words("positions", positions, 32)
    counter = np.stack([position, sample_index, prompt_id & _WORD, prompt_id >> _32])
    words = philox(counter, np.stack([seed & _WORD, seed >> _32]))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)  # 27 and 26 bits
    return ((high << np.uint64(26)) | low).astype(np.float64) * 2.0**-53


def _words(name: str, values: ArrayLike, bits: int) -> NDArray[np.uint64]:
    values = list(values)  # type: ignore[arg-type]
    low, high = min(values, default=0), max(values, default=0)
    if low < 0 or high >= 2**bits:
        raise ValueError(f"{name} must lie in [0, 2**{bits}), got {low} to {high}")
    return np.array(values, dtype=np.uint64)
