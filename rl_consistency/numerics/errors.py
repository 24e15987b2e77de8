"""The error of a broken promise."""

from __future__ import annotations

from collections.abc import Mapping


class ConsistencyError(RuntimeError):
    """A consistency promise does not hold: bytes that must be equal differ.

    Callers' mistakes are `ValueError` or `TypeError`; this one says that numbers already computed
    must not be trusted, and names which.

    Args:
        message: what differs, and what to do.
        metrics: what had been measured of the step when it was found; logged before a run stops.
    """

    def __init__(
        self, message: str, *, metrics: Mapping[str, float | int | str | bool] | None = None
    ):
        super().__init__(message)
        self.metrics = dict(metrics or {})
