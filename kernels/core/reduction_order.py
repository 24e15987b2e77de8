"""What a canonical reduction order is, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReductionOrder:
    """The order in which one op adds up each of its output elements.

    The pseudocode is the contract: any schedule that yields the same bits may stand behind it. A
    run's fingerprint hashes `id`, `version` and the pseudocode of its device, so two programs that
    add in different orders refuse to be compared.
    """

    id: str
    """Name of the op, unique in the registry."""
    version: int
    """Raised whenever the same inputs would give other bits than before."""
    cpu: str
    """The order and the rounding points on a CPU: pseudocode precise enough to write a second
    schedule from."""
    cuda: str | None = None
    """The same on CUDA; None where both devices add alike."""

    def on(self, device_type: str) -> str:
        """The pseudocode for `cpu` or `cuda`."""
        return self.cuda if device_type == "cuda" and self.cuda is not None else self.cpu

    @property
    def tag(self) -> str:
        """`id/vN`, the short form used in logs and errors."""
        return f"{self.id}/v{self.version}"
