"""Gradients of matrices on a GPU: accuracy, schedules, sizes and offsets of the outer fold."""

import pytest
import torch

from rl_consistency.kernels.gradient_fold import outer_triton as gradient_fold_triton
from rl_consistency.kernels.gradient_fold.op import (
    fold_columns,
)
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer, takes_descriptors
from rl_consistency.kernels.gradient_fold.schedules import POINTER, TMA
from tests.gpu.kernels.gradient_fold.gradient_fold_cases import (
    K,
    N,
    data,
    operands,
    outer,
    same_bytes,
)

pytestmark = pytest.mark.gpu


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
