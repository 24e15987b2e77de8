"""Sum and mean of the active values of a batch, in an order that padding does not change.

Shapes: values [...], mask [...] bool or None -> scalar.
Dtypes and rounding points: widened to fp32; fp32 tree; the mean divides once.
Order: ORDER below, `masked_reduction`.
Invariant to: padding, packing and the values at inactive places (NaN included).
Varies with: the logical order of the active values.
Backward: plain autograd; each active value receives the scalar's gradient (the mean's / count).
Errors: ValueError on a mask of another shape, and on the mean of nothing.
Cost: one gather and 2n additions.
"""

from __future__ import annotations

from torch import Tensor

from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.reduction.tree_sum import tree_sum

ORDER = ReductionOrder(
    id="masked_reduction",
    version=1,
    cpu="""\
v = the active values in row-major order
sum = row_reduction(v)
mean = fp32(sum / len(v))
""",
)


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
