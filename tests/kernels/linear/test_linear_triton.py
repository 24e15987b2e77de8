import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.linear.few_rows_triton import (
    gate_up_glu_op,
    qkv_fwd,
    qkv_op,
)
from rl_consistency.kernels.linear.op import linear_reference
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu_reference
from tests.comparison import assert_within

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

M, K = 19, 104
COLUMNS = (72, 40, 24)


def operands(dtype=torch.bfloat16):
    x = probe((M, K), dtype, scale=0.25)
    weights = [probe((n, K), dtype, seed=n, scale=K**-0.5) for n in COLUMNS]
    return x, weights, [probe((n,), dtype, seed=n + 1) for n in COLUMNS]


def glu_of(x, w_gate, w_up, activation):
    gate, up = (linear_reference(x, w).to(x.dtype) for w in (w_gate, w_up))
    return glu_reference(gate, up, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, M])
def test_the_picked_schedules_match_fp64(dtype, m):
    x, weights, biases = operands(dtype)
    x = x[:m]
    for y, weight, bias in zip(qkv_op(x, *weights, *biases), weights, biases, strict=True):
        assert y.dtype == dtype
        assert_within(y, linear_reference(x, weight, bias), "reduction", dtype)
    w_gate = weights[0]
    w_up = w_gate.flip(0)
    for activation in ACTIVATIONS:
        y = gate_up_glu_op(x, w_gate, w_up, activation)
        assert_within(y, glu_of(x, w_gate, w_up, activation), "reduction", dtype)


def test_operands_of_any_stride():
    x, weights, biases = operands()
    turned = [w.t().contiguous().t() for w in weights]
    strided = [torch.stack([b, b + 1], dim=1)[:, 0] for b in biases[:2]]
    one = biases[2][:1].expand(COLUMNS[2])
    found = qkv_fwd(x.t().contiguous().t(), *turned, *strided, one)
    for y, weight, bias in zip(found, weights, [*biases[:2], one], strict=True):
        assert_within(y, linear_reference(x, weight, bias), "reduction", torch.bfloat16)
