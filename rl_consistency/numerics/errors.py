"""The error of a broken promise."""

from __future__ import annotations


class ConsistencyError(RuntimeError):
    """A consistency promise does not hold: bytes that must be equal differ.

    Callers' mistakes are `ValueError` or `TypeError`; this one says that numbers already computed
    must not be trusted, and names which.
    """
