"""What a forward pass reads of a model, compared in each step with what it was at the beginning.

A change that is undone before a rollout ends leaves no trace at its end, so each step looks:

* at classes, their calls, attributes, hooks, submodules and configs, and at the place and the
  version of each weight: in parts of some ten microseconds, all of them in each step where the host
  has nothing else to do, and one of them in the others;
* at some values of each weight, all of them in a small model: a write through `.data` or from
  another library leaves the version as it was. On a GPU the values come a step later, and only
  every few steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.reduction.weights_digest import (
    LINE_BYTES,
    WORD_BYTES,
    ComingSums,
    PlacedWords,
)
from rl_consistency.models.snapshot import Change, Snapshot
from rl_consistency.rollout.device.device_state import to_host

NUM_VALUES = 1 << 16
"""Values of weights that are compared; of each weight 16 or more, or all."""
FEWEST_VALUES = 16
NUM_SHARES = 4  # looks that share the values, on a CPU
VALUES_EVERY = 8  # steps between two looks at values on a GPU

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Values(Protocol):
    def changed(self) -> Change | None: ...


class StepWatch:
    """Compares a patched model with a snapshot of it. It keeps the weights' memory: drop it when
    the rollout ends."""

    def __init__(
        self, snapshot: Snapshot, weights: Iterable[tuple[str, Tensor]], *, placed: bool = False
    ) -> None:
        """`placed`: the weights `fit` reading by their addresses."""
        self._parts, self._next = snapshot.looks(), 0
        # They keep the memory, which is read by its address, where a parameter is given other.
        self._memory = named = [(name, x.detach()) for name, x in weights if x.numel()]
        self._values: _Values = _PlacedValues(named) if placed else _ValuesOnHost(named)

    def look(self, is_busy: Callable[[], bool] | None = None) -> Change | None:
        """The first difference found: by all parts, or by one and as many more as fit in while a
        device `is_busy`."""
        for _ in self._parts:
            part = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            if (change := part()) is not None:
                return change
            if is_busy is not None and not is_busy():
                break
        return self._values.changed()


class _PlacedValues:
    """Runs of values of each weight, from places drawn at random, by the sums of the weights
    digest: one launch reads them all."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named]
        words = np.array([tensor.nbytes // WORD_BYTES for _, tensor in named])
        most = max(NUM_VALUES // len(named), FEWEST_VALUES)
        sizes = np.array([tensor.itemsize for _, tensor in named])
        lengths = np.minimum(words, most * sizes // WORD_BYTES)
        step = LINE_BYTES // WORD_BYTES  # a run begins where a thread reads a line
        drawn = np.random.default_rng()  # of its own: the user's random numbers stay as they are
        starts = drawn.integers((words - lengths) // step + 1) * step
        addresses = np.array([tensor.data_ptr() for _, tensor in named]) + WORD_BYTES * starts
        self._runs = PlacedWords(
            addresses.tolist(), lengths.tolist(), starts.tolist(), named[0][1].device
        )
        self._kept: ComingSums | Tensor = self._runs.launch()
        self._num_looks = 0
        self._coming: ComingSums | None = None

    def changed(self) -> Change | None:
        """A difference in what was read at a step before: the host never waits."""
        if self._coming is None:
            if self._num_looks % VALUES_EVERY == 0:
                self._coming = self._runs.launch()
            self._num_looks += 1
        if self._coming is None or not self._coming.are_there():
            return None
        if isinstance(self._kept, ComingSums):  # was queued before, so it is there
            self._kept = self._kept.read()
        differ = (self._coming.read() != self._kept).any(dim=1)
        self._coming = None
        if not differ.any():
            return None
        return Change(f"{self._names[int(differ.int().argmax())]} has other values", True)


class _ValuesOnHost:
    """Runs of values of each weight, from places drawn at random."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        drawn = random.Random()  # of its own: the user's random numbers stay as they are
        tensors = sorted(named, key=lambda entry: entry[1].numel())
        groups: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
        left = NUM_VALUES
        for i, (name, tensor) in enumerate(tensors):
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor[(0,) * (tensor.ndim - 1)]
            count = min(len(flat), max(FEWEST_VALUES, left // (len(tensors) - i)))
            left -= count
            start = drawn.randint(0, len(flat) - count)
            run = flat[start : start + count].view(_INTEGERS[flat.element_size()])
            groups.setdefault((run.device, run.element_size()), []).append((name, run))
        self._on_gpu = any(device.type == "cuda" for device, _ in groups)
        self._shares = [_Runs(g, i) for i in range(NUM_SHARES) for g in groups.values()]
        self._num_looks = 0
        self._coming: tuple[_Runs, Tensor, torch.cuda.Event | None] | None = None

    def _take(self) -> tuple[_Runs, Tensor, torch.cuda.Event | None]:
        runs = self._shares[0]
        self._shares.append(self._shares.pop(0))
        values = to_host(torch.cat(runs.runs))
        done = torch.cuda.Event() if self._on_gpu else None
        if done is not None:
            done.record()
        return runs, values, done

    def changed(self) -> Change | None:
        """A difference in what was taken, now on a CPU, before on a GPU: the host never waits."""
        if self._coming is None:
            if not self._on_gpu or self._num_looks % VALUES_EVERY == 0:
                self._coming = self._take()
            self._num_looks += 1
        if self._coming is None:
            return None
        runs, values, done = self._coming
        if done is not None and not done.query():
            return None
        self._coming = None
        differ = values.numpy() != runs.kept
        if not differ.any():
            return None
        return Change(f"{runs.name_of(int(differ.argmax()))} has other values", True)


class _Runs:
    """A share of the runs of all weights, and their values at the beginning."""

    def __init__(self, named: list[tuple[str, Tensor]], share: int) -> None:
        self._names = [name for name, _ in named]
        self.runs = [
            run
            if (size := len(run) // NUM_SHARES) < FEWEST_VALUES
            else run[size * share : len(run) if share == NUM_SHARES - 1 else size * (share + 1)]
            for _, run in named
        ]
        self.kept = torch.cat(self.runs).cpu().numpy()

    def name_of(self, place: int) -> str:
        """The weight that a value belongs to."""
        ends = np.cumsum([len(run) for run in self.runs])
        return self._names[int(np.searchsorted(ends, place, side="right"))]
