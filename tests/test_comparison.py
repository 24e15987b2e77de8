import math

import pytest
import torch

from rl_consistency.numerics.errors import ConsistencyError
from tests.comparison import assert_within, tolerance


def test_values_inside_pass_and_the_first_outside_is_shown():
    reference = torch.ones(2, 3, dtype=torch.float64)
    candidate = reference.clone()
    candidate[1, 0] += 1.9e-5
    assert_within(candidate, reference, "elementwise", torch.float32)
    candidate[1, 1] += 3e-5
    candidate[1, 2] -= 3e-5
    with pytest.raises(ConsistencyError, match=r"2 of 6 values.*first at \[1, 1\].*1\.00003.*1\.0"):
        assert_within(candidate, reference, "elementwise", torch.float32)


def test_gradients_may_have_a_bound_of_their_own():
    reference, candidate = torch.zeros(1), torch.full((1,), 0.08)
    assert_within(candidate, reference, "reduction", torch.bfloat16, gradient=True)
    with pytest.raises(ConsistencyError, match="forward"):
        assert_within(candidate, reference, "reduction", torch.bfloat16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_a_nonfinite_value_on_any_side_is_a_violation(value, sides):
    candidate, reference = (torch.tensor([0.0, value if side else 0.0]) for side in sides)
    with pytest.raises(ConsistencyError, match=r"1 of 2 .*first at \[1\]"):
        assert_within(candidate, reference, "reduction", torch.float32)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        assert_within(torch.zeros(2), torch.zeros(3), "reduction", torch.float32)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_within(torch.zeros(0), torch.zeros(0), "reduction", torch.float32)
    with pytest.raises(ValueError, match="float8"):
        tolerance("reduction", torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="softmax"):
        tolerance("softmax", torch.float32)  # type: ignore[arg-type]
