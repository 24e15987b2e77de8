"""The tolerance contract: the only numbers in this project by which two values may differ.

Claims about consistency are judged by bytes. These bounds compare *different* implementations
(another device, a higher-precision reference): `|candidate - reference| <= atol + rtol *
|reference|`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_consistency.numerics.errors import ConsistencyError

Kind = Literal["elementwise", "reduction", "attention", "logprob"]

ERROR_GROWTH_LIMIT = 1.05
"""Claim C6: our error against fp64 is at most this many times the stock op's."""

RATIO_BAND = (0.8, 1.2)
"""An importance ratio outside this band counts towards the clip fraction of a drift report."""


@dataclass(frozen=True)
class Tolerance:
    """An absolute and a relative bound, added."""

    atol: float
    rtol: float


CONTRACTS: dict[tuple[Kind, torch.dtype], tuple[float, float]] = {
    ("elementwise", torch.float32): (1e-5, 1e-5),
    ("elementwise", torch.bfloat16): (2e-2, 1.6e-2),
    ("elementwise", torch.float16): (1e-3, 1e-3),
    ("reduction", torch.float32): (1e-4, 1e-4),
    ("reduction", torch.bfloat16): (5e-2, 2e-2),
    ("reduction", torch.float16): (1e-3, 1e-3),
    ("attention", torch.float32): (1e-4, 1e-4),
    ("attention", torch.bfloat16): (5e-2, 2e-2),
    ("attention", torch.float16): (1e-3, 1e-3),
    ("logprob", torch.float32): (1e-5, 0.0),
    ("logprob", torch.bfloat16): (6e-2, 0.0),
    ("logprob", torch.float16): (5e-3, 0.0),
}
"""(atol, rtol) of each class of ops in each dtype."""
GRADIENT_CONTRACTS = CONTRACTS | {
    ("reduction", torch.bfloat16): (1e-1, 2e-2),
    ("logprob", torch.bfloat16): (5e-2, 0.0),
}


def tolerance(kind: Kind, dtype: torch.dtype, *, gradient: bool = False) -> Tolerance:
    """The bound for a class of ops in a dtype.

    Raises:
        ValueError: the contract has no such class or dtype.
    """
    bounds = GRADIENT_CONTRACTS if gradient else CONTRACTS
    if (kind, dtype) not in bounds:
        kinds = sorted({known for known, _ in bounds})
        dtypes = sorted({str(known) for _, known in bounds})
        raise ValueError(
            f"no tolerance for {kind!r} in {dtype}; there is one for {kinds} x {dtypes}"
        )
    return Tolerance(*bounds[kind, dtype])


def assert_within(
    candidate: Tensor, reference: Tensor, kind: Kind, dtype: torch.dtype, gradient: bool = False
) -> None:
    """Check every element of `candidate` against `reference` in fp64; any shape and float dtype.

    `dtype` is the one the candidate was computed in. A NaN or an infinity is always a violation.

    Raises:
        ConsistencyError: an element is out of bounds; names how many, the first one and both
        values. ValueError: shapes differ, nothing is compared, or the contract has no such class.
    """
    if candidate.shape != reference.shape:
        raise ValueError(
            f"shapes differ: candidate {list(candidate.shape)}, reference {list(reference.shape)}"
        )
    if candidate.numel() == 0:
        raise ValueError("there is nothing to compare: both tensors are empty")
    bound = tolerance(kind, dtype, gradient=gradient)
    got = candidate.detach().cpu().double()
    wanted = reference.detach().cpu().double()
    excess = (got - wanted).abs() - (bound.atol + bound.rtol * wanted.abs())
    # Written so that NaN, which fails every comparison, is a violation.
    violations = ~(excess <= 0)
    if not violations.any():
        return
    first = tuple(violations.nonzero()[0].tolist())
    raise ConsistencyError(
        f"{int(violations.sum())} of {violations.numel()} values ({kind}, {dtype}, "
        f"{'gradient' if gradient else 'forward'}) exceed atol {bound.atol} + rtol {bound.rtol} * "
        f"|reference|; first at {list(first)}: got {got[first].item()!r}, "
        f"reference {wanted[first].item()!r}"
    )
