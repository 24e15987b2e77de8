"""The error of a broken promise."""

from __future__ import annotations

from collections.abc import Mapping


class ConsistencyError(RuntimeError):
    """A consistency promise does not hold: bytes that must be equal differ, so that numbers already
    computed must not be trusted. Callers' mistakes are `ValueError` or `TypeError`.

    `metrics` is what had been measured of the step until then; it is logged before a run stops.
    """

    def __init__(
        self, message: str, *, metrics: Mapping[str, float | int | str | bool] | None = None
    ):
        super().__init__(message)
        self.metrics = dict(metrics or {})
