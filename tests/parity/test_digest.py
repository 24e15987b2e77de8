import math

import pytest
import torch
from torch import nn

from rl_consistency.parity.digest import (
    SMALL,
    each_digest,
    joint_digest,
    list_digest,
    parameter_digest,
)
from tests.comparison import first_difference


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_weights_have_one_digest_and_one_bit_changes_it(dtype):
    a, b = model(dtype), model(dtype)
    before = parameter_digest(a)
    assert before == parameter_digest(b) and len(before) == 64
    with torch.no_grad():
        b[1].weight.view(torch.uint8)[0, 0] ^= 1
    assert parameter_digest(b) != before


def test_the_digest_reads_name_dtype_and_shape():
    zeros = torch.zeros(4)
    others = [
        {"b": zeros},
        {"a": zeros.view(2, 2)},
        {"a": zeros.view(torch.int32)},
        {"a": torch.zeros(2), "a2": torch.zeros(2)},
        {"a": -zeros},
    ]
    digests = {parameter_digest(tensors) for tensors in [{"a": zeros}, *others]}
    assert len(digests) == 6


def test_the_digest_does_not_depend_on_the_order_of_the_names_or_on_strides():
    a, b = torch.randn(3, 5), torch.randn(())
    assert parameter_digest({"a": a, "b": b}) == parameter_digest({"b": b, "a": a})
    assert parameter_digest({"a": a}) == parameter_digest({"a": a.t().contiguous().t()})
    assert parameter_digest({"a": torch.empty(0, 3)}) != parameter_digest({"a": torch.empty(3, 0)})


def test_a_missing_gradient_is_not_a_zero_gradient():
    zeros = {"a": torch.zeros(3), "b": torch.zeros(2, 3)}
    found = [zeros, {**zeros, "b": None}, {**zeros, "b": -zeros["b"]}, {"b": None, "a": None}]
    assert len({joint_digest(each_digest(gradients)) for gradients in found}) == 4


def test_the_joint_digest_reads_names_and_digests_in_no_order():
    each = {"a": "12", "b": "34"}
    assert joint_digest(each) == joint_digest(dict(reversed(each.items())))
    others = [{"a": "12"}, {"a": "12", "b": "35"}, {"a": "12", "c": "34"}, {"a": "34", "b": "12"}]
    assert len({joint_digest(other) for other in [each, *others]}) == 5


def test_the_first_difference_is_the_first_name_in_order():
    a = {"b": torch.ones(2), "a": torch.zeros(2), "c": torch.tensor([math.nan])}
    same = {name: value.clone() for name, value in a.items()}
    assert first_difference(a, same) is None
    assert first_difference(a, same | {"c": torch.ones(1), "b": torch.zeros(2)}) == "b"
    assert first_difference(a, same | {"a": -torch.zeros(2)}) == "a"
    assert first_difference(a, same | {"a": torch.zeros(2, dtype=torch.float64)}) == "a"
    assert first_difference(a, same | {"aa": torch.zeros(1)}) == "aa"


@pytest.mark.parametrize("size", [3, SMALL])
def test_the_digest_of_a_tensor_tells_its_bits_its_name_and_no_layout(size):
    weight = torch.arange(2.0 * size).reshape(2, size)
    found = each_digest({"a": weight, "b": weight, "c": weight.T.contiguous().T})
    assert len({*found.values()}) == 3
    assert each_digest({"a": weight.T.contiguous().T})["a"] == found["a"]
    changed = weight.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9e9))
    assert each_digest({"a": changed})["a"] != found["a"]


def test_the_digest_of_a_list_tells_values_order_and_cuts():
    parts = [torch.tensor([1, 2]), torch.tensor([3])]
    cut_elsewhere = [torch.tensor([1]), torch.tensor([2, 3])]
    others = [parts[::-1], cut_elsewhere, [parts[0], -parts[1]]]
    assert list_digest([part.clone() for part in parts]) == list_digest(parts)
    assert list_digest(parts) not in map(list_digest, others)
