"""The winners that a bench runs with: those it measures, whatever the user's cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch as attribute

import torch

from rl_consistency.kernels.core import findings
from rl_consistency.kernels.core.findings import Findings


@contextmanager
def own_winners(device: torch.device) -> Iterator[Findings]:
    """Inside the block the device has the winners of an empty store in memory, and those kept in
    it; the user's come back behind it."""
    store = Findings(None, {})
    with attribute.dict(findings._by_device, {device: store}):
        findings.forget_picks()
        yield store
    findings.forget_picks()
