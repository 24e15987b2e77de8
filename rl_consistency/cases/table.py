"""Every op, and its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rl_consistency.cases import attention, linear, pointwise, reductions, rms_norm, token_logprobs
from rl_consistency.cases.case import Case, Setting
from rl_consistency.cases.experts import experts_cases, router_cases

CASES: Mapping[str, Callable[[Setting], Iterator[Case]]] = {
    "matmul": linear.matmul_cases,
    "row_reduction": reductions.row_reduction_cases,
    "linear": linear.linear_cases,
    "rms_norm": rms_norm.rms_norm_cases,
    "rotary": pointwise.rotary_cases,
    "glu": pointwise.glu_cases,
    "embedding": pointwise.embedding_cases,
    "attention": attention.attention_cases,
    "router": router_cases,
    "experts": experts_cases,
    "token_logprobs": token_logprobs.token_logprobs_cases,
    "masked_reduction": reductions.masked_reduction_cases,
    "gradient_norm": reductions.gradient_norm_cases,
}
"""Op -> its cases at the sizes of a setting."""

FP32_ONLY = ("masked_reduction", "gradient_norm")
"""Ops whose operands are fp32 whatever the model is."""

PARTS = ("matmul", "row_reduction")
"""Parts of other ops: reported, and judged as those."""
