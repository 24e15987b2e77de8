"""sum_i x[..., i] in a fixed pairwise order.

Shapes: [..., n] -> [...].
Dtypes and rounding points: widened to fp32; every pairwise sum rounds once to fp32.
Order: ORDER below, `row_reduction`: elementwise additions only, so all devices agree.
Invariant to: leading dimensions, strides, threads, device.
Varies with: n.
Backward: plain autograd; each element receives the gradient of its row unchanged.
Errors: none (an empty row sums to 0).
Cost: 2n additions a row, memory-bound.

Source: pairwise summation (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
Its error grows with log2(n), not with n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.launch import next_power_of_2
from rl_consistency.kernels.core.reduction_order import ReductionOrder

ORDER = ReductionOrder(
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
