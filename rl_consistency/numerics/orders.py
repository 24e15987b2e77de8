"""The registry of canonical orders, collected from the kernel files that define them."""

from __future__ import annotations

from types import MappingProxyType

from rl_consistency.kernels import (
    attention,
    embedding,
    glu,
    gradient_fold,
    gradient_norm,
    linear,
    masked_reduction,
    matmul,
    rms_norm,
    rotary,
    row_reduction,
    sampling_support,
    token_logprobs,
)
from rl_consistency.kernels.reduction_order import ReductionOrder

_MODULES = (
    matmul,
    row_reduction,
    gradient_fold,
    linear,
    rms_norm,
    rotary,
    glu,
    embedding,
    attention,
    sampling_support,
    token_logprobs,
    masked_reduction,
    gradient_norm,
)

ORDERS = MappingProxyType({module.ORDER.id: module.ORDER for module in _MODULES})
"""Every order by id."""


def order(order_id: str) -> ReductionOrder:
    """The order with this id.

    Raises:
        ValueError: no such order.
    """
    if order_id not in ORDERS:
        raise ValueError(f"no canonical order {order_id!r}; known: {', '.join(ORDERS)}.")
    return ORDERS[order_id]
