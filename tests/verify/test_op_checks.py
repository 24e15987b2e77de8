"""Checks of single ops at the sizes of real models."""

from dataclasses import replace

import pytest
import torch

from rl_consistency.cases.case import TINY_SHAPES
from rl_consistency.verify.checks.accuracy import check_accuracy
from rl_consistency.verify.checks.ops import check_experts, check_experts_fold, check_rows
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.sweep import OpSetup


@pytest.mark.thorough
def test_gated_products_stay_finite_in_fp16_at_the_width_of_a_real_model():
    shapes = replace(TINY_SHAPES, linear=((96, 208),), glu_width=3072, hidden_size=1024)
    check_rows(tally := Tally(), OpSetup(dtype=torch.float16, shapes=shapes), "linear")
    assert tally.mismatches == 0, tally.detail
    assert tally.cases > 20


@pytest.mark.thorough
def test_experts_stay_finite_in_fp16_at_the_width_of_a_real_model():
    setup = OpSetup(dtype=torch.float16, shapes=replace(TINY_SHAPES, hidden_size=2048))
    tally = Tally()
    check_experts(tally, setup)
    check_experts_fold(tally, setup)
    check_accuracy(tally, setup, "experts")
    assert tally.mismatches == 0, tally.detail
    assert tally.cases > 50
