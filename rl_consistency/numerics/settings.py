"""Process-wide numeric settings that can change bits behind an op's back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rl_consistency.numerics.errors import ConsistencyError


@dataclass(frozen=True)
class NumericSetting:
    """One process-wide switch: how to read it, set it, and the value the orders need."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
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


def _read_blas_library() -> torch._C._BlasBackend:
    """The library behind torch.mm on CUDA; without a GPU it cannot be set and nothing reads it."""
    return torch.backends.cuda.preferred_blas_library() if torch.cuda.is_available() else _CUBLASLT


def _write_blas_library(library: torch._C._BlasBackend) -> None:
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library(library)


def _flag(name: str) -> NumericSetting:
    matmul = torch.backends.cuda.matmul
    return NumericSetting(
        f"cuda.matmul.{name}", partial(getattr, matmul, name), partial(setattr, matmul, name), False
    )


def _reduction(dtype: str) -> NumericSetting:
    """Whether sums of 16-bit products may round early, and whether K may be split."""
    name = f"allow_{dtype}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul
    return NumericSetting(
        f"cuda.matmul.{name}",
        lambda: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")),
        partial(setattr, matmul, name),
        (False, False),
    )


_get, _set = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
SETTINGS = (
    NumericSetting("float32_matmul_precision", _get, _set, "highest"),
    _flag("allow_tf32"),
    _flag("allow_fp16_accumulation"),
    _reduction("bf16"),
    _reduction("fp16"),
    NumericSetting(
        "cuda.preferred_blas_library", _read_blas_library, _write_blas_library, _CUBLASLT
    ),
)


def read_settings() -> tuple[Any, ...]:
    """What every setting is now; ConsistencyError where torch cannot say."""
    return tuple(setting.value() for setting in SETTINGS)


def write_settings(values: tuple[Any, ...]) -> None:
    """Make every setting what `read_settings` gave."""
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.write(value)


@dataclass
class _Held:
    """How many blocks hold the settings, and the values from before the first of them."""

    count: int = 0
    before: tuple[Any, ...] = ()


_held = _Held()


@contextmanager
def numeric_settings() -> Iterator[None]:
    """Hold every setting at its required value inside the block; restores on any exit.

    Blocks may overlap in any order (two patched models, one restored before the other): the last
    one to end restores what the first one found.
    """
    if _held.count == 0:
        _held.before = read_settings()
    _held.count += 1
    try:
        write_settings(tuple(setting.required for setting in SETTINGS))
        yield
    finally:
        _held.count -= 1
        if _held.count == 0:
            write_settings(_held.before)


def verify_settings() -> None:
    """Check that every setting has its required value.

    Raises:
        ConsistencyError: names each setting that something else has changed.
    """
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
            f"torch's defaults are {dtype} on {device}; a patched model needs torch.float32 on "
            "cpu. Build the model under other defaults, then call "
            "torch.set_default_dtype(torch.float32) and torch.set_default_device(None)."
        )
