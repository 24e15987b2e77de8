"""Times the schedules of an op (cold caches, medians); refuses one that gives other bytes.

`write_shipped` writes the winners of matmul into the findings that are shipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.timing import ROUNDS, Rounds
from rl_consistency.kernels.core.findings import SHIPPED
from rl_consistency.kernels.matmul.schedules import product_work
from rl_consistency.numerics.files import write_output
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning.stopwatch import Bench, interleaved
from rl_consistency.tuning.work import Work, compare


def tune(
    works: Iterable[Work], bench: Bench, file: Path | None = None, rounds: Rounds = ROUNDS
) -> dict[str, Any]:
    """Measure what the file does not have yet and print a table per work; the file is written after
    each. Returns key -> row; see `measured`."""
    rows: dict[str, Any] = {}
    if file is not None and file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
    for work in works:
        if work.key in rows:
            continue
        with numeric_settings():
            rows[work.key] = row = measured(work, bench, rounds)
        if file is not None:
            write_output(file, json.dumps(rows, indent=1) + "\n")
        print(work.key)
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            print(f"  {us:9.1f} us  {name}{' <- picked' if name == work.picked else ''}")
        for name in row["refused"]:
            print(f"   REFUSED: other bytes  {name}", flush=True)
    return rows


def measured(work: Work, bench: Bench, rounds: Rounds = ROUNDS) -> dict[str, Any]:
    """Microseconds of every candidate that gives the reference's bytes and of the other ways: op,
    shape, picked, `us` by name, `differing` elements of each other way, `refused` candidates."""
    operands = work.operands()
    found = compare(work, operands)
    for name, reason in found.unable.items():
        print(f"  {work.key} {name}: {reason}")
    # Timed calls may write into their operands, so all of them come after the comparisons.
    copies = bench.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    calls = {name: [partial(call, *each) for each in sets] for name, call in found.equal.items()}
    samples = interleaved(bench.timers(calls), **asdict(rounds))
    us = {name: 1e6 * median(seconds) for name, seconds in samples.items()}
    measured = {"us": us, "differing": found.differing, "refused": list(found.withdrawn)}
    return {"op": work.op, "shape": dict(work.shape), "picked": work.picked} | measured


def winner(row: Mapping[str, Any]) -> str:
    """The fastest candidate of a row."""
    ours = {name: us for name, us in row["us"].items() if name not in row["differing"]}
    return min(ours, key=lambda name: ours[name])


def write_shipped(
    rows: Mapping[str, Any], identity: Mapping[str, str], file: Path = SHIPPED
) -> None:
    """Write the winners into the shipped findings, whose certificates and withdrawals stay."""
    content = json.loads(file.read_text(encoding="utf-8"))
    winners = {}
    for row in rows.values():
        if row["op"] == "matmul":
            sizes = (row["shape"][size] for size in ("m", "n", "k"))
            bf16 = torch.bfloat16
            work = product_work(row["shape"]["layout"], bf16, bf16, True, *sizes)
            winners[work] = {"schedule": winner(row)}
    content |= {"identity": dict(identity), "winners": dict(sorted(winners.items()))}
    text = json.dumps(content, indent=1)
    file.write_text(re.sub(r"\{\s+(\"schedule\": .*)\s+\}", r"{\1}", text) + "\n", encoding="utf-8")
