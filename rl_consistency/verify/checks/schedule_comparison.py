"""Whether all entries of one table of schedules give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from rl_consistency.verify.checks.op_setup import OpSetup
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.compile_ahead import compile_ahead
from rl_consistency.verify.probe import probe

MAX_ROWS = 200
"""Rows of an op's operands: ragged for every tile."""

_Entry = TypeVar("_Entry")


def compare_schedules(
    tally: Tally, name: str, entries: Iterable[_Entry], run: Callable[[_Entry], Tensor]
) -> Tensor:
    """Compare what every entry gives with what the first one gives, which is returned.

    An entry that asks for more registers or shared memory than the device has in this dtype is no
    schedule of it; at least two must be.

    Raises:
        ValueError: none of them is.
    """
    choices = list(entries)
    compile_ahead(partial(within_resources, run, choice) for choice in choices)
    first: Tensor | None = None
    used = 0
    for choice in choices:
        found = within_resources(run, choice)
        if found is None:
            continue
        used += 1
        if first is None:
            first = found
        tally.equal(f"{name}, {choice}", first, found)
    tally.expect(f"{name}, entries that fit", used >= 2, f"{used} of {len(choices)}")
    if first is None:
        raise ValueError(f"{name}: no schedule of {len(choices)} fits this device.")
    return first


def within_resources(run: Callable[[_Entry], Tensor], entry: _Entry) -> Tensor | None:
    """What an entry gives, or None where the device has not the resources it asks for."""
    try:
        return run(entry)
    except OutOfResources:
        return None


def drawn(setup: OpSetup, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    """Probe values in the setup's dtype, on its device."""
    return probe(shape, setup.dtype, seed=seed, scale=scale, device=setup.device)


def rows_of(*parts: Tensor) -> Tensor:
    """Results of one call as rows of one matrix, fp32: [..., N] and [rows] -> [rows, columns].

    No finite value of fewer bits changes on its way to fp32, not even a zero's sign.
    """
    return torch.cat([part.float().view(len(part), -1) for part in parts], dim=1)
