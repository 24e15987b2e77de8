"""What tests compare by: bytes by name, and the bounds by which another implementation may differ.

Claims about consistency are judged by bytes. The bounds are for *different* implementations
(another device, a higher-precision reference): `|candidate - reference| <= atol + rtol *
|reference|`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.bytes import same_bytes

Kind = Literal["elementwise", "reduction", "attention", "logprob"]


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The first name, in sorted order, whose entries differ or that one side lacks; else None.

    Tensors are compared by dtype, shape and bytes, plain values such as digests by ==.
    """
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b or not _equal(a[name], b[name]):
            return name
    return None


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    return same_bytes(a.cpu(), b.cpu())


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
