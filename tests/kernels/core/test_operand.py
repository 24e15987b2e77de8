from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels.core import operand
from rl_consistency.kernels.core.operand import (
    ALIGNMENT_BYTES,
    DTYPES,
    aligned,
    require_device,
    require_operands,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_supported_dtypes_pass_and_absent_operands_are_skipped(dtype):
    require_operands("linear", x=torch.zeros(2, dtype=dtype), bias=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int64])
def test_a_dtype_without_an_order_is_refused(dtype):
    with pytest.raises(TypeError, match=rf"linear: x is {dtype}.*torch.bfloat16.*Load the model"):
        require_operands("linear", x=torch.zeros(2).to(dtype))


def test_operands_of_two_dtypes_are_refused():
    x, weight = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"weight is torch.bfloat16 but x is torch.float32"):
        require_operands("linear", x=x, weight=weight)


def test_operands_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="weight is on meta but x is on cpu"):
        require_operands("linear", x=torch.zeros(2), weight=torch.zeros(2, device="meta"))


def test_a_device_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match=r"linear: no schedule .* meta; available: cpu.*strict"):
        require_device("linear", torch.zeros(2, device="meta"))


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(operand, "capability", lambda device: (9, 0))
    on_second = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    require_device("linear", on_second)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"linear: .* on cuda:1 but .* cuda:0.*set_device"):
        require_device("linear", on_second)


@pytest.mark.parametrize("found", [(7, 0), (7, 5)])
def test_a_gpu_without_the_matrix_units_is_refused(monkeypatch, found):
    monkeypatch.setattr(operand, "capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    older = SimpleNamespace(device=torch.device("cuda", 0))
    has = rf"cuda:0 has compute capability 7\.{found[1]}"
    with pytest.raises(ValueError, match=rf"linear: {has}; .* need 8\.0 \(Ampere\) or later.*CPU"):
        require_device("linear", older)


@pytest.mark.parametrize("found", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_a_gpu_with_the_matrix_units_is_accepted(monkeypatch, found):
    monkeypatch.setattr(operand, "capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    require_device("linear", SimpleNamespace(device=torch.device("cuda", 0)))


def test_autocast_is_refused():
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="linear: autocast is on for cpu"),
    ):
        require_operands("linear", x=torch.zeros(2))


def test_a_misaligned_tensor_is_copied_and_an_aligned_one_is_not():
    storage = torch.arange(64.0)
    shifted = storage[1:]
    copy = aligned(shifted)
    assert copy.data_ptr() % ALIGNMENT_BYTES == 0
    assert torch.equal(copy, shifted)
    assert aligned(copy) is copy


@pytest.fixture
def on_cuda(monkeypatch):
    """A CPU tensor that says it lies on cuda:0, which is the current device."""
    for name, value in {
        "is_cuda": True,
        "is_cpu": False,
        "device": torch.device("cuda", 0),
    }.items():
        monkeypatch.setattr(torch.Tensor, name, value, raising=False)
    monkeypatch.setattr(operand, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return torch.zeros(2)


def test_another_current_device_is_refused_after_an_accepted_call(on_cuda, monkeypatch):
    require_operands("linear", x=on_cuda, weight=on_cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ValueError, match=r"linear: .* on cuda:0 but .* cuda:1.*set_device"):
        require_operands("linear", x=on_cuda, weight=on_cuda)


def test_autocast_is_refused_after_an_accepted_call(on_cuda, monkeypatch):
    require_operands("linear", x=on_cuda)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with pytest.raises(ValueError, match="linear: autocast is on for cuda"):
        require_operands("linear", x=on_cuda)
