"""The sampled audit of products by the library and by winners of `tune`: of every `AUDIT_EVERY`-th
call some rows are computed again.

`cublaslt` and `winner_audit` ask `due` at each such call and record the rows they computed again.
The device counts the differences, so the host waits only in `schedule_audit`, which reads the
counters. If any row differed, it strikes every product sampled since the last reading: its
certificate, or its winner. The counters are process-wide.

The rollout keeps CUDA graphs and cached keys that library products computed. It notes the
`generation` it made them in and drops them once that number has grown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from rl_consistency.kernels.core.cache.tuned_schedules import struck_schedules
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.core.grid import cdiv

AUDIT_EVERY = 257
"""Calls from one audit to the next. A prime, so that the audits reach every site of a
step."""

AUDIT_ROWS = 64
"""Rows of a result that an audit computes again."""


class Audited(Protocol):
    """A kind of product that samples are taken of; equal ones are one kind."""

    @property
    def name(self) -> str: ...
    def strike(self, reason: str) -> None: ...


@dataclass(frozen=True)
class AuditReport:
    """What the audits of this process have found."""

    calls: int
    """Products by the library or by a winner of `tune`."""
    audited: int
    """Calls of which a sample of rows was computed again."""
    differing: int
    """Sampled elements that differed; anything but 0 breaks the promise."""
    found: int
    """Part of `differing` that was found since the last report."""
    struck: list[str]
    """Names of the products that lost their certificate or their winner, in order of withdrawal."""
    struck_schedules: list[str] = field(default_factory=list)
    """`work: schedule` of each candidate whose bytes differed when `tune` compared it."""


@dataclass
class _Counts:
    calls: int = 0
    audited: int = 0
    differing: int = 0
    struck: list[str] = field(default_factory=list)
    on_device: dict[torch.device, Tensor] = field(default_factory=dict)
    """Elements that differed since the last reading, [] int64."""
    pending: dict[Audited, None] = field(default_factory=dict)
    """Products sampled since the last reading."""


_counts = _Counts()
_lock = RLock()
"""Held where samples are recorded and read: engines and trainers may share a process by threads."""


def schedule_audit() -> AuditReport:
    """Read the counters (the host waits) and report.

    If an element differed, every product sampled since the last report is struck. The caller
    decides what a difference means; nothing is raised.
    """
    with _lock:
        found = 0
        for counter in _counts.on_device.values():
            found += int(counter)
            counter.zero_()
        if found:
            for audited in sorted(_counts.pending, key=lambda audited: audited.name):
                audited.strike("an audited sample of rows differed")
                _counts.struck.append(audited.name)
        _counts.pending.clear()
        _counts.differing += found
    return AuditReport(
        _counts.calls,
        _counts.audited,
        _counts.differing,
        found,
        list(_counts.struck),
        struck_schedules(),
    )


def withdraw(name: str) -> None:
    """Count a winner that was in use and whose bytes differ as withdrawn."""
    _counts.struck.append(name)


def generation() -> int:
    """Number of withdrawals so far (the host waits).

    What an earlier generation computed may come from a product that differs.
    """
    return len(schedule_audit().struck)


def withdrawn_since(generation: int) -> list[str]:
    """Names of the products withdrawn since a generation; reads no counter."""
    return _counts.struck[generation:]


def due() -> bool:
    """Count one call and say whether to audit it; not while kernels compile ahead, when nothing is
    computed."""
    if compiles_only():
        return False
    _counts.calls += 1
    if _counts.calls % AUDIT_EVERY:
        return False
    _counts.audited += 1
    return True


def sampled_rows(count: int, device: torch.device) -> Tensor:
    """At most `AUDIT_ROWS` indices spread over `count` rows; other ones at each audit."""
    apart = cdiv(count, AUDIT_ROWS)
    return torch.arange(_counts.audited % apart, count, apart, device=device)


def record(audited: Audited, found: Tensor, expected: Tensor) -> None:
    """Count the elements of `found` that differ from `expected`; the host does not wait."""
    # The first call may run in inference mode, and an inference tensor cannot be added to later.
    with _lock, torch.inference_mode(False):
        _counts.pending[audited] = None
        if found.device not in _counts.on_device:
            zero = torch.zeros((), dtype=torch.int64, device=found.device)
            _counts.on_device[found.device] = zero
        _counts.on_device[found.device].add_(differing_elements(found, expected))


def differing_elements(a: Tensor, b: Tensor) -> Tensor:
    """Number of elements whose bytes differ, two NaN being equal; the host does not wait."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return ((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum()
