from dataclasses import FrozenInstanceError

import pytest

from rl_consistency.kernels.core.reduction_order import ReductionOrder


def test_tag_names_the_op_and_the_version():
    assert ReductionOrder(id="linear", version=3, cpu="upward").tag == "linear/v3"


def test_an_order_cannot_be_changed():
    order = ReductionOrder(id="linear", version=1, cpu="upward")
    with pytest.raises(FrozenInstanceError):
        order.cpu = "downward"  # pyright: ignore[reportAttributeAccessIssue]
