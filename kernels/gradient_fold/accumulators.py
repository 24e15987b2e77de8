"""The tensors a gradient is summed in: their dtype, their sum, and how a later pass takes them up.

Shapes: those of the parameter.
Dtypes and rounding points: `accumulator_dtype`; one rounding to the gradient's dtype.
Order: accumulators are added in the order of the uses.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """fp64 for vectors and, on CUDA, fp32 parameters, since thousands of steps in fp32 would lose
    digits; otherwise fp32."""
    wide = parameter.dim() == 1 or (parameter.is_cuda and parameter.dtype == torch.float32)
    return torch.float64 if wide else torch.float32


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """`parameter.grad_dtype`; a compiler cannot read it and takes torch's default."""
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # pyright: ignore[reportAttributeAccessIssue]


def made_alike(gradient: Tensor, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether autograd would make such a gradient itself."""
    alike = gradient.dtype == dtype and gradient.shape == parameter.shape
    return alike and gradient.stride() == parameter.stride()


def filled(parameter: Tensor, *, zeroed: bool) -> Tensor:
    """A new accumulator, all zero or not written yet."""
    make = torch.zeros_like if zeroed else torch.empty_like
    return make(parameter, dtype=accumulator_dtype(parameter))


def add_up(accumulators: list[Tensor | None], out: Tensor) -> Tensor:
    """out <- the sum of the accumulators, in their order and dtype, rounded once."""
    parts = [part for part in accumulators if part is not None]
    if len(parts) > 1 and parts[0].dtype == out.dtype:
        # An embedding table is large: this takes no temporary and few passes.
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return out.copy_(total)


def resumed(accumulators: list[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """The accumulators of a gradient; where it was changed since, it is what it is now."""
    same = add_up(accumulators, torch.empty_like(gradient)) == gradient
    found: list[Tensor | None] = []
    changed: Tensor | float = gradient
    for part in accumulators:
        found.append(None if part is None else torch.where(same, part, changed))
        changed = changed if part is None else 0.0
    return found


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bytes."""
    a, b = (tensor.contiguous().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)
