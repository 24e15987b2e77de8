"""One uniform number for each (seed, prompt id, sample index, position), and no state.

The generator is Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), a keyed bijection of a 128-bit counter: a number is looked up, and
neither the batch, nor the step, nor the neighbours of a sample can move it. Key: the 64-bit seed.
Counter words, low to high: position, sample index, prompt id (two words). The number is made of the
first two output words: the upper 27 bits of one, the upper 26 of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.sampling.vocabulary_triton import philox_uniforms

ROUNDS = 10
KEY_WORDS = 5  # words of a stream key: seed low and high, sample index, prompt id low and high

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def stream_keys(
    seeds: Sequence[int], prompt_ids: Sequence[int], sample_indices: Sequence[int]
) -> NDArray[np.int64]:
    """What of a number's address stays the same along a sample: [n, 5] 32-bit words.

    Each argument [n] holds non-negative integers: seeds and prompt ids below 2**64, sample indices
    below 2**32 (a ValueError otherwise).
    """
    given = {"seeds": (seeds, 64), "prompt_ids": (prompt_ids, 64)}
    for name, (values, bits) in (given | {"sample_indices": (sample_indices, 32)}).items():
        if not all(0 <= value < 2**bits for value in values):
            raise ValueError(f"{name} must lie in [0, 2**{bits}), got {values}")
    samples = zip(seeds, prompt_ids, sample_indices, strict=True)
    words = [(s & _WORD, s >> 32, index, p & _WORD, p >> 32) for s, p, index in samples]
    return np.array(words, dtype=np.int64).reshape(-1, KEY_WORDS)


def device_uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits, computed on the keys' device.

    keys [n, 5] int64 as from `stream_keys`, of any strides; positions [n] int64 in [0, 2**32), of
    which the low 32 bits are read. Returns [n] fp64; row i depends on the i-th entries alone. The
    host does not wait. On a CPU torch's integer operations compute the same bits as the kernel.
    """
    shapes = (tuple(keys.shape), tuple(positions.shape))
    if shapes != ((len(positions), KEY_WORDS), (len(positions),)) or (
        keys.dtype != torch.int64 or positions.dtype != torch.int64
    ):
        raise ValueError(
            f"random stream: keys {shapes[0]} {keys.dtype} and positions {shapes[1]} "
            f"{positions.dtype}; need int64 [n, {KEY_WORDS}] and [n]."
        )
    if keys.is_cuda:
        return philox_uniforms(keys, positions)
    k0, k1, sample_index, prompt_low, prompt_high = keys.unbind(1)
    c0, c1, c2, c3 = positions & _WORD, sample_index, prompt_low, prompt_high
    for _ in range(ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return (((c0 >> 5) << 26) | (c1 >> 6)).double() * 2.0**-53


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two words, in steps that fit 63 bits."""
    upper = (multiplier >> 16) * word
    lower = (multiplier & 0xFFFF) * word
    low = (((upper & 0xFFFF) << 16) + lower) & _WORD
    return (upper + (lower >> 16)) >> 16, low
