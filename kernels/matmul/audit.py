"""The sampled audit of products by the vendor library: of every `AUDIT_EVERY`-th call a sample is
computed again by our own schedule.

The device counts the differences, so the host waits only in `schedule_audit`, which reads the
counters. If an element differed, the certificate of every product sampled since the last reading is
withdrawn. The counters are process-wide.

The rollout keeps CUDA graphs and cached keys that library products computed. It notes how many
`withdrawals` there were when it made them, and drops them once there are more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import unrecorded
from rl_consistency.kernels.core.compile_ahead import require_launches
from rl_consistency.kernels.core.findings import findings_of, withdrawn_schedules
from rl_consistency.kernels.core.launch import cdiv

AUDIT_EVERY = 257
"""Calls from one audit to the next. A prime, so that the audits reach every site of a
step."""

AUDIT_ROWS = 64
"""Rows of a result that an audit computes again."""


@dataclass(frozen=True)
class AuditReport:
    """What the audits of this process have found."""

    calls: int
    """Products by the library."""
    audited: int
    """Calls of which a sample was computed again."""
    differing: int
    """Sampled elements that differed; anything but 0 breaks the promise."""
    found: int
    """Part of `differing` that was found since the last report."""
    withdrawn: list[str]
    """Names of the products whose certificate, or winner of `tune`, was withdrawn, in order."""
    withdrawn_schedules: list[str] = field(default_factory=list)
    """`work: schedule` of each candidate whose bytes differed when `tune` compared it."""


@dataclass
class _Counts:
    calls: int = 0
    audited: int = 0
    differing: int = 0
    withdrawn: list[str] = field(default_factory=list)
    on_device: dict[torch.device, Tensor] = field(default_factory=dict)
    """Elements that differed since the last reading, [] int64."""
    pending: set[tuple[str, torch.device]] = field(default_factory=set)
    """Products sampled since the last reading."""


_counts = _Counts()
_lock = RLock()
"""Held where samples are recorded and read: engines and trainers may share a process by threads."""


def schedule_audit() -> AuditReport:
    """Read the counters (the host waits) and report.

    If an element differed, every product sampled since the last report is withdrawn. The caller
    decides what a difference means; nothing is raised.
    """
    with _lock:
        found = 0
        for counter in _counts.on_device.values():
            found += int(counter)
            counter.zero_()
        if found:
            for name, device in sorted(_counts.pending, key=str):
                findings_of(device).withdraw(name, "an audited sample differed")
                withdraw(name)
        _counts.pending.clear()
        _counts.differing += found
    counts = _counts.calls, _counts.audited, _counts.differing
    return AuditReport(*counts, found, list(_counts.withdrawn), withdrawn_schedules())


def withdraw(name: str) -> None:
    """Count a product that was in use and whose bytes differ as withdrawn."""
    _counts.withdrawn.append(name)


def withdrawals() -> int:
    """Number of withdrawals so far (the host waits).

    What was computed while there were fewer may come from a product that differs.
    """
    return len(schedule_audit().withdrawn)


def withdrawn_since(withdrawals: int) -> list[str]:
    """Names of the products withdrawn after so many withdrawals; reads no counter."""
    return _counts.withdrawn[withdrawals:]


def sample(
    name: str, run: Callable[[], Tensor], again: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """`run()`, a product by the library whose certificate has a name; audited if it is due.

    `again` gives some elements of the product and what our own schedule computes for them. Nothing
    is computed again while a CUDA graph is captured.
    """
    require_launches("an audit")
    with unrecorded():
        y = run()
        if not torch.cuda.is_current_stream_capturing():
            _counts.calls += 1
            if _counts.calls % AUDIT_EVERY == 0:
                _counts.audited += 1
                record(name, *again(y))
    return y


def sampled_rows(count: int, device: torch.device) -> Tensor:
    """At most `AUDIT_ROWS` indices spread over `count` rows; other ones at each audit."""
    apart = cdiv(count, AUDIT_ROWS)
    return torch.arange(_counts.audited % apart, count, apart, device=device)


def record(name: str, found: Tensor, expected: Tensor) -> None:
    """Count the elements of `found` that differ from `expected`; the host does not wait."""
    # The first call may run in inference mode, and an inference tensor cannot be added to later.
    with _lock, torch.inference_mode(False):
        _counts.pending.add((name, found.device))
        if found.device not in _counts.on_device:
            zero = torch.zeros((), dtype=torch.int64, device=found.device)
            _counts.on_device[found.device] = zero
        _counts.on_device[found.device].add_(differing_elements(found, expected))


def differing_elements(a: Tensor, b: Tensor) -> Tensor:
    """Number of elements whose bytes differ, two NaN being equal; the host does not wait."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return ((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum()
