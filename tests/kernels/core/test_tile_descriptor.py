"""Descriptors made without checks are those that Triton makes with them."""

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_consistency.kernels.core.launch import gluon_descriptor, tile_descriptor

FIELDS = ("shape", "strides", "block_shape", "padding")


def same(made, checked):
    pairs = [(getattr(made, field), getattr(checked, field)) for field in FIELDS]
    assert made.base is checked.base and type(made) is type(checked)
    assert all(a == (list(b) if isinstance(a, list) else b) for a, b in pairs)
    assert vars(type(made)).keys() == vars(type(checked)).keys()


@pytest.mark.parametrize("rows", [1, 64])
def test_a_tile_descriptor_is_tritons(rows):
    x = torch.zeros(rows, 3, 32)[:, 1]
    same(tile_descriptor(x, (16, 32)), TensorDescriptor.from_tensor(x, [16, 32]))


def test_a_view_of_rows_and_heads_is_described_as_one_matrix():
    x = torch.zeros(64, 2, 32)
    made = tile_descriptor(x, (16, 32), shape=(64, 64), strides=(64, 1))
    same(made, TensorDescriptor(x, [64, 64], [64, 1], [16, 32]))


def test_a_gluon_descriptor_is_gluons():
    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.bfloat16)
    made = gluon_descriptor(x, (16, 32), x.shape, x.stride(), layout)
    same(made, hopper.TensorDescriptor.from_tensor(x, [16, 32], layout))
    assert made.layout == layout
