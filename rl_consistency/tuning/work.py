"""One op at one shape: its candidates, and which of them give the reference's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from rl_consistency.cases.case import Op, as_tuple
from rl_consistency.cases.launches import Launch
from rl_consistency.kernels.core.findings import schedule_name

Shape = Mapping[str, Any]
"""Names of sizes and their values."""

COPY_BANDWIDTH, MATMUL_RATE = 3e12, 6e14
"""Bytes a second and products a second that bound a work from below: they order the works, and no
figure is made of them."""

UNABLE = (OutOfResources, PTXASError, CompilationError, RuntimeError)
"""What a candidate raises that does not fit; of RuntimeErrors, only the compiler's."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One op at one shape."""

    op: str
    shape: Shape
    operands: Callable[[], tuple[Tensor, ...]]
    """Makes the operands, with the same values at each call."""
    candidates: Mapping[str, Op]
    """Name of a schedule -> the op with that schedule."""
    picked: str
    """The candidate that the op's rule takes, whose bytes are the reference. Where it is none of
    them, the first is."""
    others: Mapping[str, Op] = field(default_factory=dict)
    """Ways to the result that are timed beside the schedules, whatever their bytes."""
    entry: str = ""
    """The name that the winner is kept under; empty for a work that no pick looks up."""
    fewer: Work | None = None
    """The work with fewer rows of its bucket, where a winner must not lose to the op's rule."""
    moved_bytes: float = 0.0
    """Bytes of operands and results."""
    seconds: float = 0.0
    """What all its calls may take in a step of training, roughly; works are tuned in this order."""

    @property
    def key(self) -> str:
        """Name of the work in results."""
        return " ".join([self.op, *(f"{name}={size}" for name, size in self.shape.items())])

    @property
    def default(self) -> str:
        """The candidate whose bytes are the reference."""
        return self.picked if self.picked in self.candidates else next(iter(self.candidates))


def work_of(launch: Launch, calls: float = 1.0) -> Work:
    """The work of a launch that a step of training makes `calls` times."""
    least = max(launch.moved / COPY_BANDWIDTH, 2 * launch.products / MATMUL_RATE)
    return Work(
        op=launch.op,
        shape=launch.shape,
        operands=launch.operands,
        candidates={schedule_name(s): partial(launch.run, s) for s in launch.schedules},
        picked=schedule_name(launch.picked),
        others=launch.library,
        entry=launch.entry,
        moved_bytes=launch.moved,
        seconds=calls * least,
    )


def fewer_rows(rows: int) -> int:
    """Rows from the lower end of the bucket that ends at `rows`: 9/16 of them."""
    return max(1, rows * 9 // 16)


def with_fewer(works: Iterable[Work], fewer: Iterable[Work]) -> list[Work]:
    """Works by entry, each with that of `fewer` whose rows share its bucket and are not its own."""
    by_entry = {work.entry: work for work in fewer}
    found = {work.entry: work for work in works}
    for entry, work in found.items():
        other = by_entry.get(entry)
        if other is not None and other.shape != work.shape:
            found[entry] = replace(work, fewer=other)
    return list(found.values())


@dataclass(frozen=True)
class Comparison:
    """What the candidates of a work gave."""

    equal: dict[str, Op]
    """Candidates with the reference's bytes, and the other ways."""
    withdrawn: dict[str, str]
    """Candidates with other bytes: why."""
    unable: dict[str, str]
    """Candidates that do not fit this device or do not compile for it: why."""
    differing: dict[str, int]
    """Elements of each other way that differ from the reference."""


def compare(work: Work, operands: tuple[Tensor, ...], only: tuple[str, ...] = ()) -> Comparison:
    """Run the candidates and the other ways, or `only` some and the default, and compare bytes with
    the default's. Each call has operands of its own, since it may write into them."""
    names = dict.fromkeys([work.default, *work.candidates, *work.others])
    wanted = [name for name in names if not only or name in (work.default, *only)]
    found = Comparison({}, {}, {}, {})
    reference: list[Tensor] = []
    for name in wanted:
        call = work.candidates.get(name) or work.others[name]
        try:
            result = call(*(x.clone() for x in operands))
        except UNABLE as error:
            if name == work.default or not does_not_compile(error):
                raise
            found.unable[name] = str(error)
            continue
        result = [*as_tuple(result)]
        reference = reference or result
        counts = [_differing(a, b) for a, b in zip(result, reference, strict=True)]
        if name in work.others:
            found.differing[name] = sum(counts)
        elif any(counts):
            of = sum(x.numel() for x in reference)
            found.withdrawn[name] = f"{sum(counts)} of {of} elements differ from {work.default}"
            continue
        found.equal[name] = call
    return found


def does_not_compile(error: Exception) -> bool:
    """Whether one of `UNABLE` says that a schedule does not fit the device, or does not compile."""
    return not isinstance(error, RuntimeError) or "PassManager::run failed" in str(error)


def _differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bytes differ."""
    if a.numel() == 0:
        return 0
    a, b = (x.contiguous().view(torch.uint8).view(*x.shape, -1) for x in (a, b))
    return int((a != b).any(-1).sum())
