"""Writes what is shipped with the kernels: the winners of products at the models' shapes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.shapes import ROWS, WEIGHTS
from benchmarks.suite import own_winners
from benchmarks.timing import Machine
from rl_consistency.cases.case import Setting
from rl_consistency.cases.launches import Launch, product
from rl_consistency.kernels.core.findings import SHIPPED, Findings, Winner
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning.tune import tune_works


def tune_products(machine: Machine) -> dict[str, Winner]:
    """The winner of each product that has a faster schedule than what runs now, by its work."""
    works, setting = [], Setting(dtype=torch.bfloat16, device=machine.device)
    for weight, layout, m in itertools.product(WEIGHTS, ("nt", "nn"), ROWS):
        n, k = weight if layout == "nt" else weight[::-1]
        works.append(product(setting, layout, m, n, k))
    with winners_of(machine, works) as store:
        return store.winners


@contextmanager
def winners_of(machine: Machine, works: Sequence[Launch]) -> Iterator[Findings]:
    """Inside the block the device has the winners of these works and no others. ConsistencyError
    where a schedule gave other bytes."""
    with own_winners(machine.device) as store:
        with numeric_settings(), torch.no_grad():
            report = tune_works(works, machine, store, clock=lambda: 0.0)
        if report.withdrawn:
            raise ConsistencyError(f"candidates gave other bytes: {report.withdrawn}")
        yield store


def write_shipped(
    winners: Mapping[str, Winner], identity: Mapping[str, str], file: Path = SHIPPED
) -> None:
    """Put winners over those of the shipped findings, whose certificates and withdrawals stay."""
    content = json.loads(file.read_text("utf-8"))
    found = {work: {"schedule": winner.schedule} for work, winner in winners.items()}
    held = dict(sorted((content["winners"] | found).items()))
    text = json.dumps(content | {"identity": dict(identity), "winners": held}, indent=1)
    file.write_text(re.sub(r"\{\s+(\"schedule\": .*)\s+\}", r"{\1}", text) + "\n", "utf-8")
