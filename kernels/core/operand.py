"""What every op checks about its operands before it computes."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from rl_consistency.kernels.core.device import MIN_CAPABILITY, capability

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the canonical orders are defined for (fp8 is not)."""

ALIGNMENT_BYTES = 64
"""A CPU matrix library may split off the first elements of a misaligned operand, which changes its
sums."""


def require_operands(op: str, **operands: Tensor | None) -> None:
    """Check the operands of an op; the first is a tensor, others may be None.

    Raises:
        TypeError: a dtype outside `DTYPES`, or operands of different dtypes.
        ValueError: different devices, a device without a schedule, or autocast is on.
    """
    tensors = iter(operands.values())
    first = next(tensors)
    assert first is not None
    dtype, device = first.dtype, first.device
    fits = dtype in DTYPES
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != dtype or tensor.device != device):
            fits = False
    if not fits:
        _refuse(op, {name: tensor for name, tensor in operands.items() if tensor is not None})
    # A device makes its type's name each time it is asked, which takes longer than all else here.
    kind = "cpu"
    if first.is_cuda:
        kind = "cuda"
        _require_current(op, device)
    elif not first.is_cpu:
        kind = device.type
        require_device(op, first)
    if torch.is_autocast_enabled(kind):
        raise ValueError(
            f"{op}: autocast is on for {kind}; it would choose rounding points behind "
            "the canonical order. Turn it off (mixed_precision: no) and load the policy in the "
            "dtype it should compute in."
        )


def _refuse(op: str, operands: dict[str, Tensor]) -> NoReturn:
    (first_name, first), *_ = operands.items()
    dtype, device = first.dtype, first.device
    for name, tensor in operands.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}; a canonical order exists for "
                f"{', '.join(str(d) for d in DTYPES)}. Load the model in one of these."
            )
        if tensor.dtype != dtype:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype} but {first_name} is {dtype}; "
                "all operands share one dtype. Cast the model once, with model.to(dtype)."
            )
        if tensor.device != device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first_name} is on {device}; "
                "move them to one device."
            )
    raise AssertionError(f"{op}: operands refused without a reason")


def require_device(op: str, tensor: Tensor) -> None:
    """Check that the op's order has a schedule for the tensor's device.

    Raises:
        ValueError: neither a CPU nor the current NVIDIA GPU, of compute capability 8.0 or later.
    """
    device = tensor.device
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ValueError(
            f"{op}: no schedule of the canonical order for device {device}; available: cpu, cuda. "
            f"Move the model to one of these, or switch this op to its stock path with "
            f"strict(except_={{{op!r}}})."
        )
    _require_current(op, device)


def _require_current(op: str, device: torch.device) -> None:
    """The part of `require_device` that concerns CUDA."""
    # A compiled graph runs on the device of its inputs.
    if not torch.compiler.is_compiling() and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{op}: the operands are on {device} but the current device is "
            f"cuda:{torch.cuda.current_device()}, where kernels would be launched. Call "
            "torch.cuda.set_device, or run inside torch.cuda.device(...)."
        )
    found = capability(device)
    if found < MIN_CAPABILITY:
        raise ValueError(
            f"{op}: {device} has compute capability {found[0]}.{found[1]}; the schedules need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ampere) or later. Run on the CPU or on a "
            "newer GPU."
        )


def aligned(tensor: Tensor) -> Tensor:
    """`tensor` itself if it starts on a 64-byte boundary, else a copy that does."""
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()
