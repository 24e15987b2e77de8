"""Data on which a wrong summation order shows.

Small integers sum exactly in every order, and values of one size hide a lost low bit. A probe is
normal, times a random power of two per element, times a large one in a few outlier channels:
partial sums then cancel and round at many scales, in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EXPONENTS, OUTLIER_EXPONENTS = (-8, 4), (3, 7)
"""Each element is scaled by 2**e, e uniform in the first range, its end left out; outlier channels
by another 2**e with e in the second."""


def probe(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Probe values [*shape]; the same arguments give the same bytes on one kind of device.

    One channel (index of the last dimension) in 16, and at least one, is an outlier. Magnitudes
    stay below 2**12 * scale, so fp16 holds them at scale 1. An empty shape is a ValueError.
    """
    if not shape or min(shape) < 1:
        raise ValueError(f"a probe needs at least one dimension, all positive, got {list(shape)}")
    channels = shape[-1]
    drawn: dict[str, Any] = {"device": device}
    drawn["generator"] = torch.Generator(device).manual_seed(seed)
    values = torch.randn(tuple(shape), **drawn)
    exponents = torch.randint(*EXPONENTS, tuple(shape), dtype=torch.int32, **drawn)
    outliers = torch.randperm(channels, **drawn)[: max(channels // 16, 1)]
    more = torch.randint(*OUTLIER_EXPONENTS, (len(outliers),), dtype=torch.int32, **drawn)
    exponents[..., outliers] += more
    # In place: tune draws the weights of a whole head.
    return values.ldexp_(exponents).mul_(scale).to(dtype)


def probe_tokens(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids, one list per length. A sequence depends on the seed and its own index alone.

    About half the tokens come from eight ids, so that most of them repeat: the gradient of an
    embedding row is then a sum whose order matters.
    """
    if vocab_size < 1 or any(length < 0 for length in lengths):
        given = f"got {vocab_size}, {list(lengths)}"
        raise ValueError(f"vocab_size must be positive and lengths not negative, {given}")

    def generator(stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed * 1_000_003 + stream)

    frequent = torch.randint(0, vocab_size, (8,), generator=generator(0)).tolist()
    sequences = []
    for index, length in enumerate(lengths):
        own, ids = generator(index + 1), []
        # One token at a time: a longer sequence then begins with the shorter one.
        for _ in range(length):
            common, choice, other = torch.randint(0, 2**62, (3,), generator=own).tolist()
            ids.append(frequent[choice % 8] if common % 2 else other % vocab_size)
        sequences.append(ids)
    return sequences
