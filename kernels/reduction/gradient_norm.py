"""sqrt(sum over tensors of sum(g^2)): the global gradient norm in a fixed order.

Shapes: any number of tensors of any shape -> scalar.
Dtypes and rounding points: widened to fp32; squares and sums in fp32; one square root.
Order: ORDER below, `gradient_norm`.
Invariant to: the number of threads.
Varies with: the order of the tensors; pass them in `named_parameters()` order.
Backward: none.
Errors: none. Non-finite gradients give a non-finite norm, which the caller reports.
Cost: 3 n elementwise operations.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.reduction.tree_sum import tree_sum

ORDER = ReductionOrder(
    id="gradient_norm",
    version=1,
    cpu="""\
total = 0
for each tensor g, in the order given:
    total = fp32(total + row_reduction(fp32(g * g), flattened))
norm = sqrt(total)
""",
)


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Global L2 norm, fp32 scalar; 0 for no tensors."""
    total = torch.zeros(())
    for gradient in gradients:
        wide = gradient.detach().float().flatten()
        total = total.to(wide.device) + tree_sum(wide * wide)
    return total.sqrt()
