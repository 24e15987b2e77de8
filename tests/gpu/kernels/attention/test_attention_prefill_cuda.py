"""Prefill into a paged cache on a GPU: prompts, and prompts that continue a past."""

from functools import partial

import pytest
import torch

from rl_consistency.kernels.attention.op import attention_paged
from tests.gpu.kernels.attention.attention_cases import (
    BF16,
    FP16,
    FP32,
    MAIN,
    WINDOWED,
    Case,
    all_same,
    among,
    cached_keys,
    name,
    paged_layout,
    sequence,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "case",
    [MAIN, WINDOWED, Case(BF16, 80, heads=6), Case(FP16, 96, 300), Case(FP32, 32)],
    ids=name,
)
def test_sequences_without_a_past_may_read_keys_where_the_call_has_them(case):
    """Prompts, continued prompts and decoded tokens in one call, and prompts alone."""
    parts = sequence(case, 0)[:3]
    for spans in ([(0, 700), (129, 1000), (0, 1), (4095, 4096), (0, 129)], [(0, 250), (0, 2048)]):
        layout = paged_layout(spans, *cached_keys(case))
        q, k, v = (torch.cat([t[start:end] for start, end in spans]) for t in parts)
        call = partial(attention_paged, q, layout, 0, **case.options)
        expected = [torch.cat([t[start:end] for start, end in spans]) for t in among(case)[0]]
        assert all_same(call(new=(k, v)), expected)
        assert all_same(call(), expected)
        assert not all_same(call(new=(k, v + 1)), expected)
