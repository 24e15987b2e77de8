"""The kernel that resumes a fold, in the interpreter: what torch's own operations give."""

import pytest
import torch

from rl_consistency.kernels.gradient_fold.resume_triton import BLOCK, resume_accumulators
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.probe import probe

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no NVIDIA GPU"
)

SIZES = (1, 17, BLOCK, BLOCK + 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(size, wide, dtype, two):
    """Accumulators, their rounded sum, and the same after a hook has changed some elements."""
    parts = [probe((size,), torch.float32, seed=seed).to(wide) * 1.1 for seed in range(1 + two)]
    gradient = sum(parts).float().to(dtype)
    changed = gradient.clone()
    changed[::3] *= 2
    changed[size // 2] = float("inf")
    return parts, gradient, changed


def expected(parts, gradient):
    same = sum(parts).float().to(gradient.dtype) == gradient
    fallback = [gradient.to(parts[0].dtype), *(torch.zeros_like(part) for part in parts[1:])]
    return [torch.where(same, part, new) for part, new in zip(parts, fallback, strict=True)]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_a_changed_element_goes_on_from_the_gradient_and_others_from_the_sum(
    size, wide, dtype, two
):
    parts, gradient, changed = case(size, wide, dtype, two)
    for now in (gradient, changed):
        wanted = expected(parts, now)
        resumed = [part.clone() for part in parts]
        resume_accumulators(now, resumed[0], resumed[1] if two else None)
        assert all(same_bytes(a, b) for a, b in zip(resumed, wanted, strict=True))


def test_a_nan_counts_as_changed():
    parts = [torch.full((4,), float("nan")), torch.ones(4)]
    resume_accumulators(torch.full((4,), float("nan")), *parts)
    assert parts[0].isnan().all() and same_bytes(parts[1], torch.zeros(4))


def test_nothing_is_resumed_of_an_empty_gradient():
    empty = torch.empty(0)
    resume_accumulators(empty, empty.clone(), None)
