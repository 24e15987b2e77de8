"""Process-wide numeric settings that can change bits behind an op's back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from rl_consistency.numerics.errors import ConsistencyError


class NumericSetting(NamedTuple):
    """One process-wide switch: how to read it, set it, and the value the orders need."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    required: Any

    def value(self) -> Any:
        """What it is now; ConsistencyError where torch cannot say."""
        try:
            return self.read()
        except RuntimeError as error:  # torch's newer switches were set beside the older ones
            reason = str(error).splitlines()[0]
            raise ConsistencyError(
                f"{self.name} cannot be read ({reason}). Undo what set the newer switch, "
                "`fp32_precision` say."
            ) from error


_CUBLASLT = torch._C._BlasBackend.Cublaslt


def _blas_library(library: Any = None) -> Any:
    """The library behind torch.mm on CUDA; without a GPU it cannot be set and nothing reads it."""
    if not torch.cuda.is_available():
        return _CUBLASLT
    return torch.backends.cuda.preferred_blas_library(library)


def _flushes_denormals(denormal: float = sys.float_info.min / 2) -> bool:
    """Whether this thread takes the smallest numbers for zero; torch can only set it."""
    return denormal * 1.0 == 0.0


def _flag(name: str, *more: str) -> NumericSetting:
    """A switch of CUDA's products; one that says `more` is read and set as a tuple."""
    matmul, required = torch.backends.cuda.matmul, (False, False) if more else False
    read, write = partial(attrgetter(name, *more), matmul), partial(setattr, matmul, name)
    return NumericSetting(f"cuda.matmul.{name}", read, write, required)


_REDUCTIONS = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
"""Whether sums of 16-bit products may round early; the second value, whether K may be split."""
_get, _set = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
SETTINGS = (
    NumericSetting("float32_matmul_precision", _get, _set, "highest"),
    _flag("allow_tf32"),
    _flag("allow_fp16_accumulation"),
    *(_flag(name, f"{name}_split_k") for name in _REDUCTIONS),
    NumericSetting("cuda.preferred_blas_library", _blas_library, _blas_library, _CUBLASLT),
    NumericSetting("flush_denormal", _flushes_denormals, torch.set_flush_denormal, False),
)


def read_settings() -> tuple[Any, ...]:
    """What every setting is now; ConsistencyError where torch cannot say."""
    return tuple(setting.value() for setting in SETTINGS)


def write_settings(values: tuple[Any, ...]) -> None:
    """Make every setting what `read_settings` gave."""
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.write(value)


_held: list[tuple[Any, ...]] = []
"""For each block that holds the settings, their values from before the first of them."""


@contextmanager
def numeric_settings() -> Iterator[None]:
    """Hold every setting at its required value inside the block; restores on any exit.

    Blocks may overlap in any order (two patched models, one restored before the other): the last
    one to end restores what the first one found.
    """
    _held.append(_held[0] if _held else read_settings())
    try:
        write_settings(tuple(setting.required for setting in SETTINGS))
        yield
    finally:
        before = _held.pop()
        if not _held:
            write_settings(before)


def verify_settings() -> None:
    """ConsistencyError naming each setting that something else has changed."""
    found = [(s, s.value()) for s in SETTINGS]
    wrong = [f"{s.name} is {v!r}, needs {s.required!r}" for s, v in found if v != s.required]
    if wrong:
        raise ConsistencyError(
            f"process-wide numeric settings changed: {'; '.join(wrong)}. Run inside "
            "numeric_settings(), and remove what sets them."
        )


def verify_defaults() -> None:
    """ValueError if tensors without a dtype or device would be others than fp32 on the CPU."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32 or device.type != "cpu":
        raise ValueError(
            f"torch's defaults are {dtype} on {device}; a patched model needs fp32 on the CPU: "
            "torch.set_default_dtype(torch.float32), torch.set_default_device(None)."
        )
