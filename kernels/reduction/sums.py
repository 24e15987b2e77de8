"""Sums in a fixed pairwise order: of rows, of the active values of a batch, of squared gradients.

Shapes: `tree_sum` [..., n] -> [...]; `masked_sum` and `masked_mean`, values [...] and a mask [...]
    bool or None, -> scalar; `gradient_norm`, any number of tensors of any shape, -> scalar.
Dtypes and rounding points: widened to fp32; every pairwise sum rounds once to fp32. The mean
    divides once; the norm squares and adds in fp32 and takes one square root.
Order: the ORDERs below. `row_reduction` has elementwise additions only, so all devices agree.
Invariant to: leading dimensions, strides, threads, device. `masked_reduction`: padding, packing and
    the values at inactive places (NaN included).
Varies with: n; the logical order of the active values; the order of the gradients, which are passed
    in `named_parameters()` order.
Backward: plain autograd; each (active) element receives the gradient of its sum unchanged, of a
    mean divided by the count. `gradient_norm`: none.
Errors: ValueError on a mask of another shape, and on the mean of nothing. An empty row sums to 0;
    gradients that are not finite give such a norm, which the caller reports.
Cost: 2n additions a row, memory-bound; one gather for a mask; 3n operations for the norm.

Source: pairwise summation (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
Its error grows with log2(n), not with n.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rl_consistency.kernels.core.launch import next_power_of_2
from rl_consistency.kernels.core.reduction_order import ReductionOrder

ROW_REDUCTION = ReductionOrder(
    id="row_reduction",
    version=1,
    cpu="""\
w = smallest power of two >= n
while w > 1:
    w = w / 2
    x[i] = fp32(x[i] + x[i + w]) for each i < w where both exist
sum = x[0]
""",
)

MASKED_REDUCTION = ReductionOrder(
    id="masked_reduction",
    version=1,
    cpu="""\
v = the active values in row-major order
sum = row_reduction(v)
mean = fp32(sum / len(v))
""",
)

GRADIENT_NORM = ReductionOrder(
    id="gradient_norm",
    version=1,
    cpu="""\
total = 0
for each tensor g, in the order given:
    total = fp32(total + row_reduction(fp32(g * g), flattened))
norm = sqrt(total)
""",
)


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum floating x over `dim` in the halving order -> fp32, the shape of x without `dim`."""
    x = x.float().movedim(dim, -1)
    n = x.shape[-1]
    if n == 0:
        return x.new_zeros(x.shape[:-1])
    half = next_power_of_2(n) // 2
    if half > 0 and n < 2 * half:
        upper = x[..., half:]
        x = torch.cat([x[..., : n - half] + upper, x[..., n - half : half]], dim=-1)
        half //= 2
    while half:
        x = x[..., :half] + x[..., half:]
        half //= 2
    return x[..., 0]


def masked_sum(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """fp32 sum of the active values; 0 when none is active."""
    return tree_sum(_active(values, mask))


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """fp32 mean of the active values; ValueError when none is active."""
    active = _active(values, mask)
    if active.numel() == 0:
        raise ValueError(
            "masked_mean: no value is active, so there is no mean; check the loss mask (are all "
            "completions empty or masked as overlong?)."
        )
    return tree_sum(active) / active.numel()


def _active(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.flatten()
    if mask.shape != values.shape:
        raise ValueError(
            f"mask {tuple(mask.shape)} must have the shape of the values {tuple(values.shape)}."
        )
    return values[mask.bool()]


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Global L2 norm, fp32 scalar; 0 for no tensors."""
    total = torch.zeros(())
    for gradient in gradients:
        wide = gradient.detach().float().flatten()
        total = total.to(wide.device) + tree_sum(wide * wide)
    return total.sqrt()
