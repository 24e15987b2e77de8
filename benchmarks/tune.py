"""`python -m benchmarks tune matmul`: the winners of products at the models' shapes, which are
shipped with the kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product as combinations
from pathlib import Path
from unittest.mock import patch as attribute

import torch

from benchmarks.shapes import MODELS, ROWS, weights_of
from rl_consistency.cases.case import Setting
from rl_consistency.cases.launches import Launch, product
from rl_consistency.kernels.core import findings
from rl_consistency.kernels.core.findings import SHIPPED, Findings, Winner
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning.stopwatch import ColdDevice
from rl_consistency.tuning.tune import tune_works


def tune_products(bench: ColdDevice) -> dict[str, Winner]:
    """The winner of each product that has a faster schedule than what runs now, by its work."""
    works, setting = [], Setting(dtype=torch.bfloat16, device=bench.device)
    for weight, layout, m in combinations(weights_of(MODELS), ("nt", "nn"), ROWS):
        n, k = weight if layout == "nt" else weight[::-1]
        works.append(product(setting, layout, m, n, k))
    with winners_of(bench, works) as store:
        return store.winners


@contextmanager
def winners_of(bench: ColdDevice, works: Sequence[Launch] = ()) -> Iterator[Findings]:
    """Inside the block the device has the winners of these works and no others; the user's come
    back behind it. ConsistencyError where a schedule gave other bytes."""
    store = Findings(None, {})
    with attribute.dict(findings._by_device, {bench.device: store}):
        findings.forget_picks()
        if works:
            with numeric_settings(), torch.no_grad():
                report = tune_works(works, bench, store, clock=lambda: 0.0)
            if report.withdrawn:
                raise ConsistencyError(f"candidates gave other bytes: {report.withdrawn}")
        yield store
    findings.forget_picks()


def write_shipped(
    winners: Mapping[str, Winner], identity: Mapping[str, str], file: Path = SHIPPED
) -> None:
    """Put winners over those of the shipped findings, whose certificates and withdrawals stay."""
    content = json.loads(file.read_text("utf-8"))
    found = {work: {"schedule": winner.schedule} for work, winner in winners.items()}
    held = dict(sorted((content["winners"] | found).items()))
    text = json.dumps(content | {"identity": dict(identity), "winners": held}, indent=1)
    file.write_text(re.sub(r"\{\s+(\"schedule\": .*)\s+\}", r"{\1}", text) + "\n", "utf-8")
