import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.reduction_order import FP32_STEP
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import CANDIDATES, POINTER, POINTER_FP32
from tests.comparison import assert_within

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

M, N, K = 37, 56, 104


def operands(dtype, k=K):
    a = probe((M, k), dtype, scale=0.25)
    return a, probe((N, k), dtype, seed=1, scale=k**-0.5), probe((N,), dtype, seed=2)


def reference(a, b, bias=None):
    y = a.double() @ b.double().t()
    return y if bias is None else y + bias.double()


EVERY = [(s, torch.bfloat16) for s in CANDIDATES if not s.overlap]
EVERY += [(s, torch.float32) for s in POINTER_FP32]


@pytest.mark.parametrize(("schedule", "dtype"), EVERY, ids=lambda x: getattr(x, "name", str(x)))
def test_every_schedule_matches_fp64_in_both_layouts(schedule, dtype):
    a, b, bias = operands(dtype)
    y = matmul_fwd(a, b, bias, "nt", torch.float32, schedule)
    assert_within(y, reference(a, b, bias), "reduction", torch.float32)
    y = matmul_fwd(a, b.t().contiguous(), None, "nn", dtype, schedule)
    assert_within(y, reference(a, b), "reduction", dtype)


@pytest.mark.parametrize("schedule", POINTER_FP32, ids=lambda s: s.name)
def test_fp32_steps_are_added_in_fp64(schedule):
    """2**30 + 1 - 2**30, a step each: an fp32 accumulator would lose the 1."""
    large, one, back = torch.tensor([2.0**30, 1.0, -(2.0**30)])
    assert large + one + back == 0.0
    a = torch.zeros(2, 3 * FP32_STEP)
    a[:, [0, FP32_STEP, 2 * FP32_STEP]] = torch.stack([large, one, back])
    ones = torch.ones(16, 3 * FP32_STEP)
    assert (matmul_fwd(a, ones, None, "nt", torch.float32, schedule) == 1.0).all()


@pytest.mark.parametrize("schedule", POINTER[:4], ids=lambda s: s.name)
def test_any_strides_and_a_ragged_k(schedule):
    a, b, _ = operands(torch.float16, k=99)
    expected = reference(a, b)
    a = a.t().contiguous().t()
    for operand, layout in ((b, "nt"), (b.t(), "nn"), (b.t().contiguous().t(), "nt")):
        y = matmul_fwd(a, operand, None, layout, torch.float32, schedule)
        assert_within(y, expected, "reduction", torch.float32)
    row = a[:1].expand(M, 99)
    y = matmul_fwd(row, b, None, "nt", torch.float32, schedule)
    assert_within(y, reference(row, b), "reduction", torch.float32)


@pytest.mark.parametrize("schedule", [CANDIDATES[0], POINTER[0]], ids=lambda s: s.name)
def test_a_bias_of_any_stride_is_added(schedule):
    a, b, bias = operands(torch.bfloat16)
    strided = torch.stack([bias, bias + 1], dim=1)[:, 0]
    for given, same in ((strided, bias), (bias[3:4].expand(N), bias[3:4].repeat(N))):
        y = matmul_fwd(a, b, given, "nt", torch.bfloat16, schedule)
        assert torch.equal(y, matmul_fwd(a, b, same, "nt", torch.bfloat16, schedule))
        assert_within(y, reference(a, b, same), "reduction", torch.bfloat16)


def test_a_descriptor_schedule_refuses_what_it_cannot_describe():
    a, b, _ = operands(torch.bfloat16, k=99)
    with pytest.raises(ValueError, match="16-byte rows; got strides .*Use a pointer schedule"):
        matmul_fwd(a, b, None, "nt", torch.float32, CANDIDATES[0])
