"""Times the schedules of an op (cold caches, medians); refuses one that gives other bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.results import Shape
from benchmarks.timing import Contestant, Machine
from rl_consistency.cli.output_file import write_whole

Op = Callable[..., Any]
"""Operands -> a tensor or a tuple of tensors; may write into its operands."""

Way = tuple[Op, Callable[[], AbstractContextManager[Any]]]
"""Another way to the result that is timed beside the schedules, and a context to run it in."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One op at one shape."""

    op: str
    shape: Shape
    operands: Callable[[], tuple[Tensor, ...]]
    candidates: Mapping[str, Op]
    """By name of the schedule; the bytes of the first are the reference."""
    picked: str
    """The candidate that the op takes today."""
    others: Mapping[str, Way] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """As it is named in results."""
        return " ".join([self.op, *(f"{name}={size}" for name, size in self.shape.items())])


def tune(works: Iterable[Work], machine: Machine, file: Path | None = None) -> dict[str, Any]:
    """Measure what the file does not have yet; it is written after each work.

    Prints a table per work and the winners. Returns key -> row; see `measured`.
    """
    rows: dict[str, Any] = {}
    if file is not None and file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
    for work in works:
        if work.key in rows:
            continue
        rows[work.key] = row = measured(work, machine)
        if file is not None:
            write_whole(file, json.dumps(rows, indent=1) + "\n")
        print(work.key)
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            print(f"  {us:9.1f} us  {name}{' <- picked' if name == work.picked else ''}")
        for name in row["refused"]:
            print(f"   REFUSED: other bytes  {name}", flush=True)
    for key, row in rows.items():
        name, picked = winner(row), row["us"].get(row["picked"])
        gain = "" if picked is None else f", picked {picked:.1f} us ({row['picked']})"
        print(f"best of {key}: {row['us'][name]:.1f} us {name}{gain}")
    return rows


def measured(work: Work, machine: Machine) -> dict[str, Any]:
    """Microseconds of every candidate that gives the reference's bytes and of the other ways.

    Returns:
        op, shape, picked, `us` by name, `differing` elements of each other way, and the candidates
        `refused`.
    """
    operands = work.operands()
    ways: dict[str, Way] = {}
    reference: list[Tensor] = []
    refused, differing = [], {}
    for name, call in work.candidates.items():
        try:
            result = _outcome(call, operands)
        except OutOfResources as error:
            print(f"  {work.key} {name}: {error}")
            continue
        reference = reference or result
        if all(_same_bytes(a, b) for a, b in zip(result, reference, strict=True)):
            ways[name] = (call, nullcontext)
        else:
            refused.append(name)
    for name, (call, context) in work.others.items():
        with context():
            pairs = zip(_outcome(call, operands), reference, strict=True)
            differing[name] = sum(int((a != b).sum()) for a, b in pairs)
    copies = machine.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    us = {}
    for name, (call, context) in {**ways, **work.others}.items():
        us[name] = 1e6 * machine.alone(Contestant([partial(call, *s) for s in sets], context))
    found = {"us": us, "differing": differing, "refused": refused}
    return {"op": work.op, "shape": dict(work.shape), "picked": work.picked} | found


def _outcome(call: Op, operands: tuple[Tensor, ...]) -> list[Tensor]:
    """What a call gives on copies of the operands."""
    result = call(*(x.clone() for x in operands))
    return list(result) if isinstance(result, tuple) else [result]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def winner(row: Mapping[str, Any]) -> str:
    """The fastest candidate of a row."""
    ours = {name: us for name, us in row["us"].items() if name not in row["differing"]}
    return min(ours, key=lambda name: ours[name])


def label(schedule: Any) -> str:
    """A schedule's name, or its fields that are not defaults."""
    if hasattr(schedule, "name"):
        return schedule.name
    values = {f.name: (getattr(schedule, f.name), f.default) for f in fields(schedule)}
    return " ".join(f"{name}={value}" for name, (value, usual) in values.items() if value != usual)
