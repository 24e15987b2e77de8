from dataclasses import FrozenInstanceError

import pytest

from rl_consistency.kernels.reduction_order import ReductionOrder


def test_tag_names_the_op_and_the_version():
    assert ReductionOrder(id="linear", version=3, text="upward").tag == "linear/v3"


def test_an_order_cannot_be_changed():
    order = ReductionOrder(id="linear", version=1, text="upward")
    with pytest.raises(FrozenInstanceError):
        order.text = "downward"  # pyright: ignore[reportAttributeAccessIssue]
