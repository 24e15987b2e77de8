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
from rl_consistency.kernels.reduction import sums
from rl_consistency.kernels.rms_norm import op as rms_norm
from rl_consistency.kernels.sampling import op as sampling_support
from rl_consistency.kernels.token_logprobs import op as token_logprobs

_ALL = (
    *(matmul.ORDER, sums.ROW_REDUCTION, gradient_fold.ORDER, linear.ORDER, rms_norm.ORDER),
    *(rotary.ORDER, glu.ORDER, embedding.ORDER, attention.ORDER, router.ORDER, experts.ORDER),
    *(sampling_support.ORDER, token_logprobs.ORDER, sums.MASKED_REDUCTION, sums.GRADIENT_NORM),
)

ORDERS = MappingProxyType({order.id: order for order in _ALL})
"""Every order by id."""
