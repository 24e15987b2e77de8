"""A canonical reduction order as data."""

from __future__ import annotations

from dataclasses import dataclass

FP32_STEP = 16
"""Elements of the inner dimension in one step of an fp32 product on CUDA; part of the order."""


@dataclass(frozen=True, kw_only=True)
class ReductionOrder:
    """The order in which one op adds up each of its output elements.

    The pseudocode is the contract: every schedule must give its bits. A run's fingerprint hashes
    `id`, `version` and the pseudocode of its device, so runs with different orders cannot be
    compared by mistake.
    """

    id: str
    """Name of the op; unique."""
    version: int
    """Raised by one whenever the same inputs would give other bits than before."""
    cpu: str
    """Pseudocode of the order and the rounding points on a CPU. It is precise enough to write
    another schedule from."""
    cuda: str | None = None
    """Pseudocode of the order and the rounding points on CUDA; None if both devices share one."""

    def on(self, device_type: str) -> str:
        """The pseudocode for `cpu` or `cuda`."""
        return self.cuda if device_type == "cuda" and self.cuda is not None else self.cpu

    @property
    def tag(self) -> str:
        """`id/vN`, the short form used in logs and errors."""
        return f"{self.id}/v{self.version}"
