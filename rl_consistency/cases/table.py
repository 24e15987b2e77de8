"""Every op, and its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rl_consistency.cases.attention import attention_cases
from rl_consistency.cases.case import Case, Setting
from rl_consistency.cases.experts import experts_cases, router_cases
from rl_consistency.cases.linear import linear_cases, matmul_cases
from rl_consistency.cases.pointwise import embedding_cases, glu_cases, rotary_cases
from rl_consistency.cases.reductions import (
    gradient_norm_cases,
    masked_reduction_cases,
    row_reduction_cases,
)
from rl_consistency.cases.rms_norm import rms_norm_cases
from rl_consistency.cases.token_logprobs import token_logprobs_cases

CASES: Mapping[str, Callable[[Setting], Iterator[Case]]] = {
    "matmul": matmul_cases,
    "row_reduction": row_reduction_cases,
    "linear": linear_cases,
    "rms_norm": rms_norm_cases,
    "rotary": rotary_cases,
    "glu": glu_cases,
    "embedding": embedding_cases,
    "attention": attention_cases,
    "router": router_cases,
    "experts": experts_cases,
    "token_logprobs": token_logprobs_cases,
    "masked_reduction": masked_reduction_cases,
    "gradient_norm": gradient_norm_cases,
}
"""Op -> its cases at the sizes of a setting."""

FP32_ONLY = ("masked_reduction", "gradient_norm")
"""Ops whose operands are fp32 whatever the model is."""

PARTS = ("matmul", "row_reduction")
"""Parts of other ops: reported, and judged as those."""
