"""The kernel that resumes a fold, in the interpreter: what torch's own operations give."""

from types import SimpleNamespace

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold import gradient_buffer, resume_triton
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.resume_triton import Resumed, resume_accumulators
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.gradient_fold.uses import parameter

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no NVIDIA GPU"
)

SIZES = (1, 17, 64, 131)
WIDE = (torch.float32, torch.float64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(resume_triton, "BLOCK", 16)
    monkeypatch.setattr(resume_triton, "CHUNK", 32)
    resume_triton._table.cache_clear()


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
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("size", SIZES)
def test_a_changed_element_goes_on_from_the_gradient_and_others_from_the_sum(
    size, wide, dtype, two
):
    parts, gradient, changed = case(size, wide, dtype, two)
    for now in (gradient, changed):
        wanted = expected(parts, now)
        resumed = [part.clone() for part in parts]
        resume_accumulators([Resumed(now, *resumed)])
        assert all(same_bytes(a, b) for a, b in zip(resumed, wanted, strict=True))


def test_gradients_of_all_kinds_are_resumed_together():
    kinds = [(n, w, d, t) for n in SIZES for w in WIDE for d in DTYPES for t in (False, True)]
    cases = [case(*kind) for kind in kinds]
    wanted = [expected(parts, changed) for parts, _, changed in cases]
    resume_accumulators(Resumed(changed, *parts) for parts, _, changed in cases)
    for (parts, *_), right in zip(cases, wanted, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(parts, right, strict=True))


def test_a_table_is_made_again_for_other_tensors():
    for _ in range(3 * resume_triton.MOST_TABLES):
        parts, _, changed = case(17, torch.float64, torch.bfloat16, False)
        wanted = expected(parts, changed)
        resume_accumulators([Resumed(changed, *parts)])
        assert same_bytes(parts[0], wanted[0])


def test_a_ragged_start_another_layout_and_fp64_are_left_to_torch():
    x = torch.zeros(64)
    assert Resumed(x, x).fits
    assert not Resumed(x[1:], x[:-1]).fits
    assert not Resumed(x.view(8, 8).t(), x.view(8, 8)).fits
    assert not Resumed(x.double(), x.double()).fits


def test_tensors_that_are_not_alike_are_left_to_torch():
    """The data of a gradient were exchanged since its accumulators were left."""
    x = torch.zeros(64)
    assert not Resumed(x, torch.zeros(32)).fits
    assert not Resumed(x, x, torch.zeros(32)).fits
    assert not Resumed(x, x.double(), x).fits
    assert not Resumed(x.to(torch.complex64), x).fits
    assert not Resumed(x, torch.zeros(64, device="meta")).fits


@pytest.mark.parametrize("captured", [True, False])
def test_a_pass_that_is_captured_is_left_to_torch(captured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gradient_buffer, "Resumed", lambda *_: SimpleNamespace(fits=True))
    gradient = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    setattr(gradient, gradient_buffer._LEFT, gradient_buffer._Left([torch.zeros(4)]))
    kept = GradientBuffer(parameter())._gradient
    kept.parameter = SimpleNamespace(grad=gradient)
    assert (kept.resumable() is None) == captured


def test_a_nan_counts_as_changed():
    parts = [torch.full((4,), float("nan")), torch.ones(4)]
    resume_accumulators([Resumed(torch.full((4,), float("nan")), *parts)])
    assert parts[0].isnan().all() and same_bytes(parts[1], torch.zeros(4))


def test_nothing_is_resumed_of_an_empty_gradient():
    empty = torch.empty(0)
    resume_accumulators([Resumed(empty, empty.clone())])
