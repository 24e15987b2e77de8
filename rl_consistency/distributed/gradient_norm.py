"""sqrt(sum over tensors of sum(g^2)) from parts of the tensors: the same bits under any sharding.

Shapes: any number of flat parts; a rank may have any part of a tensor, or none -> a number.
Dtypes and rounding points: exact squares of fp32 values are rounded to two int64 words: to 2**-61
    of the largest square in a tensor of 2**31 elements, and finer in a smaller one. Sums of
    integers are exact; fp64 after them.
Order: ORDER below, `gradient_norm`; version 1 is that of one process.
Invariant to: which rank has what, order of tensors, number of threads.
Varies with: nothing.
Backward: none.
Errors: TypeError on a dtype other than fp32. NaN or infinite gradients give the norm NaN or inf.
Cost: two reads of a rank's parts, two waits for the device, two small messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rl_consistency.distributed.world import World
from rl_consistency.kernels.core.reduction_order import ReductionOrder

ORDER = ReductionOrder(
    id="gradient_norm",
    version=2,
    cpu="""\
for each tensor g of n elements:
    e = the least integer with max |g| < 2**e
    w = 62 - ceil(log2(n))
    high, low (int64) = the sums over its elements, in any order, of
        h = round(g * g * 2**(w - 2 e)), ties to even
        l = round((g * g * 2**(w - 2 e) - h) * 2**w), ties to even
    square (fp64) = (high * 2**w + low) * 2**(2 e - 2 w), rounded once
norm (fp64) = sqrt(the sum of the squares, rounded once)
""",
)

CHUNK = 1 << 22
"""Elements that are widened at a time."""

_ZERO, _INFINITE, _NAN = -149, 129, 130
"""Exponents that stand for zero, an infinity and NaN: -149 is the smallest, 130 the largest."""


def sharded_gradient_norm(
    world: World, parts: Mapping[str, Tensor], numels: Mapping[str, int]
) -> float:
    """Global L2 norm of tensors that the ranks share; the same number on every rank.

    Args:
        world: all its ranks call this.
        parts: fp32 parts of this rank, of any shape, by the name of the tensor; each element of a
            tensor is on one rank. A name may be absent.
        numels: elements of every whole tensor, in the same order on every rank.
    """
    for name, part in parts.items():
        if part.dtype != torch.float32:
            raise TypeError(f"the gradient of {name} must be torch.float32, got {part.dtype}.")
        if name not in numels:
            raise ValueError(f"numels lacks {name!r}; it must name every tensor on every rank.")
    if not numels:
        return 0.0
    nothing = torch.empty(0, device=world.device)
    own = [parts.get(name, nothing).detach().reshape(-1) for name in numels]
    largest = torch.stack([_largest(part) for part in own]).tolist()
    exponents = world.reduce("gradient norm: maxima", list(map(_exponent, largest)), ReduceOp.MAX)
    if max(exponents) >= _INFINITE:
        return math.nan if max(exponents) == _NAN else math.inf
    widths = [62 - (numel - 1).bit_length() for numel in numels.values()]
    words = torch.stack([_words(*given) for given in zip(own, widths, exponents)])
    sums = world.reduce("gradient norm: sums", words.flatten().tolist(), ReduceOp.SUM)
    pairs = zip(sums[::2], sums[1::2], widths, exponents)
    squares = [math.ldexp((high << w) + low, 2 * (e - w)) for high, low, w, e in pairs]
    return math.sqrt(math.fsum(squares))


def _largest(part: Tensor) -> Tensor:
    """The largest magnitude, or NaN."""
    return torch.stack(part.aminmax()).abs().amax() if len(part) else part.new_zeros(())


def _exponent(value: float) -> int:
    if not math.isfinite(value):
        return _NAN if math.isnan(value) else _INFINITE
    return math.frexp(value)[1] if value else _ZERO


def _words(part: Tensor, width: int, exponent: int) -> Tensor:
    """[2] int64: the sums of the elements' high and low words."""
    total = torch.zeros(2, dtype=torch.int64, device=part.device)
    for chunk in part.split(CHUNK):
        squares = chunk.double().square_().mul_(math.ldexp(1.0, width - 2 * exponent))
        high = squares.round()
        low = squares.sub_(high).mul_(math.ldexp(1.0, width)).round_()
        total += torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])
    return total
