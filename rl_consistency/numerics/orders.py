"""The registry of canonical orders, collected from the kernel files that define them."""

from __future__ import annotations

from types import MappingProxyType

from rl_consistency.kernels.attention import op as attention
from rl_consistency.kernels.experts import op as experts
from rl_consistency.kernels.experts import route as router
from rl_consistency.kernels.gradient_fold import op as gradient_fold
from rl_consistency.kernels.linear import op as linear
from rl_consistency.kernels.matmul import op as matmul
from rl_consistency.kernels.pointwise import embedding, glu, rotary
from rl_consistency.kernels.reduction import gradient_norm, masked_reduction
from rl_consistency.kernels.reduction import tree_sum as row_reduction
from rl_consistency.kernels.rms_norm import op as rms_norm
from rl_consistency.kernels.sampling import op as sampling_support
from rl_consistency.kernels.token_logprobs import op as token_logprobs

_MODULES = (
    *(matmul, row_reduction, gradient_fold, linear, rms_norm, rotary, glu, embedding, attention),
    *(router, experts),
    *(sampling_support, token_logprobs, masked_reduction, gradient_norm),
)

ORDERS = MappingProxyType({module.ORDER.id: module.ORDER for module in _MODULES})
"""Every order by id."""
