"""What a benchmark suite is: named cases, each of which becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from benchmarks.results_file import Shape

if TYPE_CHECKING:
    from benchmarks.timing import Ceilings, Race


class OutOfTime(Exception):
    """The time given to the command ran out within a case, which has no row then."""


class Bench(Protocol):
    """What a case asks of the machine; `bench_timing.Machine` is one."""

    device: torch.device
    ceilings: Ceilings
    deadline: float | None
    """A time of `perf_counter` past which a long case raises `OutOfTime`."""

    def copies(self, operand_bytes: int) -> int:
        """How many copies of operands exceed the cache twice over."""
        ...

    def measure(self, race: Race) -> dict[str, Any]:
        """Time all contestants and give the fields of a `Row`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured.

    `run` makes the operands, measures, and gives the row's other fields.
    """

    work: str
    shape: Shape
    run: Callable[[Bench], dict[str, Any]]
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Suite:
    """Cases that are measured and kept together."""

    name: str
    what: str
    cases: Sequence[Case]


def normal(bench: Bench, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values on the device under test."""
    return torch.randn(shape, device=bench.device, dtype=dtype)
