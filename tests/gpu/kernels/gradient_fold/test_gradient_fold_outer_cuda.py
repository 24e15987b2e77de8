"""Gradients of matrices on a GPU: accuracy, schedules, sizes and offsets of the outer fold."""

import pytest
import torch

from rl_consistency.kernels.gradient_fold import outer_triton as gradient_fold_triton
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.gradient_fold.op import (
    fold_columns,
)
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer, takes_descriptors
from rl_consistency.kernels.gradient_fold.schedules import POINTER, TMA, candidates
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT
from tests.gpu.kernels.gradient_fold.gradient_fold_cases import (
    DTYPES,
    K,
    N,
    data,
    operands,
    outer,
    same_bytes,
)

pytestmark = pytest.mark.gpu


def relative_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def stock_gradient(dy, x):
    """What torch's backward pass of a linear layer gives, in the dtype of its operands."""
    weight = torch.zeros(dy.shape[1], x.shape[1], dtype=x.dtype, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.nn.functional.linear(x, weight), weight, dy)
    return gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1024, 512, 768), (1000, 200, 136), (1, 7, 9)])
def test_outer_errs_no_more_than_the_library(shape, dtype, record_property):
    """Rounded as the library's gradient is; the fold itself keeps fp32, that of fp32 fp64."""
    dy, x = operands(dtype, *shape)
    dy = dy * 2.0**-6  # fp16 must hold the gradient
    exact = dy.double().t() @ x.double()
    start = torch.zeros(dy.shape[1], x.shape[1], dtype=accumulator_dtype(dy), device="cuda")
    folded_dw = outer(dy, x, start=start)
    error = relative_error(folded_dw.to(dtype), exact)
    assert error <= ERROR_GROWTH_LIMIT * relative_error(stock_gradient(dy, x), exact)
    if dtype == torch.float32:
        return
    # A number to know, not a bound of this order: where the library splits tokens it errs less.
    library = relative_error(torch.mm(dy.t(), x, out_dtype=torch.float32), exact)
    record_property("fp32 error", relative_error(folded_dw, exact))
    record_property("library's fp32 error", library)


@pytest.mark.parametrize("shape", [(1024, 384, 512), (1000, 200, 136), (80, 1024, 3072)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_schedule_gives_the_same_bytes(shape, dtype):
    dy, x = operands(dtype, *shape)
    start = data(shape[1:], torch.float32, seed=3)
    tma = gradient_fold_triton.has_tma(dy.device) and takes_descriptors(dy, x)
    whole = outer(dy, x, start=start)
    from_zero = outer(dy, x)
    assert same_bytes(outer(dy, x, fresh=True), from_zero)
    for schedule in candidates(dtype, tma=tma):
        assert same_bytes(outer(dy, x, schedule, start), whole), schedule
        assert same_bytes(outer(dy, x, schedule, fresh=True), from_zero), schedule


def test_a_product_from_zero_of_a_long_batch_equals_the_fold():
    """Where the certified library may serve: large and from zero."""
    dy, x = operands(tokens=8192, n=1024, k=1024)
    assert same_bytes(outer(dy, x, fresh=True), outer(dy, x, fresh=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [(0, 1), (1, 0), (3, 5)])
def test_unaligned_operands_take_pointers_and_give_the_same_bytes(offset, dtype):
    dy, x = operands(dtype)
    shifted = [
        torch.nn.functional.pad(m, (o, 1))[:, o : o + m.shape[1]]
        for m, o in zip((dy, x), offset, strict=True)
    ]
    assert not takes_descriptors(*shifted)
    assert same_bytes(outer(*shifted), outer(dy, x))


def test_odd_sizes_are_columns_of_even_ones():
    dy, x = operands()
    part = outer(dy[:, :301].contiguous(), x[:, :77].contiguous())
    assert same_bytes(part, outer(dy, x)[:301, :77].contiguous())


@pytest.mark.parametrize("filler", [16, 48, 1024])
@pytest.mark.parametrize("magnitude", [1.0, 1e-22])
def test_steps_of_zero_gradient_change_nothing(filler, magnitude):
    """Products of the second magnitude underflow, some of them to negative zero."""
    dy, x = operands()
    dy, x = dy * magnitude, x * magnitude
    filled = (
        torch.cat([dy, -torch.zeros(filler, N, device="cuda", dtype=dy.dtype)]),
        torch.cat([x, data((filler, K), seed=5)]),
    )
    start = torch.full((N, K), -0.0, device="cuda")
    tall = next(s for s in TMA if s.extra_n and s.block_k == 256)
    for schedule in (None, TMA[0], tall, POINTER[0]):
        if (
            schedule is None
            or schedule.kind == "pointer"
            or gradient_fold_triton.has_tma(dy.device)
        ):
            plain = outer(dy, x, schedule, start)
            assert same_bytes(outer(*filled, schedule, start), plain)
            assert not (torch.signbit(plain) & (plain == 0)).any()


@pytest.mark.large
@pytest.mark.parametrize("kind", ["tma", "pointer"])
def test_offsets_beyond_31_bits(kind):
    """A gradient of more than 2**31 elements, and its last rows alone."""
    if kind != "pointer" and not gradient_fold_triton.has_tma(torch.device("cuda", 0)):
        pytest.skip("needs an NVIDIA GPU with tile descriptors (sm_90)")
    schedule = next(s for s in (*TMA, *POINTER) if s.kind == kind)
    n, k = 2**19 + 256, 4096 + 8
    dy = torch.randn(32, n, device="cuda").bfloat16()
    x = torch.randn(32, k, device="cuda").bfloat16()
    buffer = torch.zeros(n, k, device="cuda")
    launch_outer(buffer, dy, x, False, schedule)
    tail = outer(dy[:, -256:].contiguous(), x, schedule)
    assert same_bytes(buffer[-256:], tail)


@pytest.mark.large
def test_operand_offsets_beyond_31_bits():
    tokens, n = 16384, 2**17 + 256
    dy = torch.zeros(tokens, n, device="cuda", dtype=torch.bfloat16)
    dy[:, -256:] = torch.randn(tokens, 256, device="cuda").bfloat16()
    x = torch.randn(tokens, 64, device="cuda").bfloat16()
    for schedule in (None, POINTER[0]):
        assert same_bytes(
            outer(dy, x, schedule)[-256:], outer(dy[:, -256:].contiguous(), x, schedule)
        )
    columns = torch.zeros(n, dtype=torch.float64, device="cuda")
    last = torch.zeros(256, dtype=torch.float64, device="cuda")
    fold_columns(columns, dy)
    fold_columns(last, dy[:, -256:])
    assert same_bytes(columns[-256:], last)
