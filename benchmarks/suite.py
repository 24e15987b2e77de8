"""What a suite is: named cases, each of which becomes one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import Shape
from benchmarks.timing import Machine


class OutOfTime(Exception):
    """The time given to the command ran out within a case; the case has no row."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured."""

    work: str
    shape: Shape
    run: Callable[[Machine], dict[str, Any]]
    """Makes the operands, measures, and gives the other fields of the row."""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """For progress and errors."""
        return " ".join([self.work, *(f"{key}={value}" for key, value in self.shape.items())])


@dataclass(frozen=True)
class Suite:
    """Cases that are measured and kept together."""

    name: str
    cases: Sequence[Case]


def normal(bench: Machine, *shape: int) -> Tensor:
    """Normal values in bf16 on the device under test."""
    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
