"""Gradients by name, collected in buckets for the ordered sum as a backward pass finishes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from rl_consistency.distributed.gradient_parts import Round
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.numerics.errors import ConsistencyError


class GradientBuckets:
    """Sums gradients by name over the parts of a step; see `OrderedSum`.

    A step: for each round of `step`, `put` every gradient of the part; then `take`, and `gather`
    where whole gradients are needed. A bucket is sent when it and those before it are full. So all
    ranks send in one order, that of a backward pass: the last parameters first. Buckets do not
    change a bit.
    """

    def __init__(
        self, total: OrderedSum, shapes: Mapping[str, tuple[int, ...]], bucket_bytes: int = 64 << 20
    ):
        """`shapes` are those of all gradients, in the same order on every rank."""
        self._total, self._shapes = total, dict(shapes)
        self._numels = {name: prod(shape) for name, shape in self._shapes.items()}
        self._buckets: list[list[str]] = []
        room = 0
        for name in reversed(self._shapes):
            room -= 4 * self._numels[name]
            if room < 0 or not self._buckets:
                self._buckets.append([])
                room = bucket_bytes - 4 * self._numels[name]
            self._buckets[-1].append(name)

    def step(self) -> Iterator[Round]:
        """The rounds of a step, for the caller's loop. The other ranks wait for what this one does
        not give, so NaN is sent for it, and `take` reports it.
        """
        self._missing: list[str] = []
        for round in self._total.step():
            self._given: set[str] = set()
            self._ready: dict[str, Tensor] = {}
            self._unsent = deque(enumerate(self._buckets))
            yield round
            lacking = [name for name in reversed(self._shapes) if name not in self._given]
            if round.part is not None:
                self._missing += [f"{name} (leaf {round.part})" for name in lacking]
            for name in lacking:
                nothing = torch.full(self._shapes[name], torch.nan, device=self._total.world.device)
                self.put(name, nothing)

    def put(self, name: str, gradient: Tensor) -> None:
        """Give away the finished gradient of a part, fp32: from a post-accumulate-grad hook in the
        part's last micro-batch, which then sets `.grad` to None. What filler gives is not added.

        Raises: TypeError on another dtype; ValueError on an unknown name, another shape or a
        gradient given twice.
        """
        if gradient.dtype != torch.float32:
            raise TypeError(
                f"the gradient of {name} must be torch.float32, got {gradient.dtype}. Patch the "
                "model with grad_dtype=torch.float32."
            )
        shape = self._shapes.get(name)
        if name in self._given or gradient.shape != shape:
            expected = "no such parameter" if shape is None else f"its shape is {list(shape)}"
            raise ValueError(
                f"the gradient of {name}, {list(gradient.shape)}, is not expected: each parameter "
                f"gives one per leaf, of its own shape ({expected})."
            )
        self._given.add(name)
        self._ready[name] = gradient.detach()
        while self._unsent and self._given.issuperset(self._unsent[0][1]):
            self._send()

    def take(self) -> dict[str, Tensor]:
        """This rank's part [n] of each flattened gradient, by name, in the order of `shapes`; names
        of which it has nothing are left out. Changes in place enter what `gather` gives.

        Raises: ConsistencyError on every rank if a rank did not give a gradient.
        """
        lacking = enumerate(self._total.world.gather("missing gradients", self._missing))
        found = [f"rank {r} has no gradient of {', '.join(m[:3])}" for r, m in lacking if m]
        if found:
            raise ConsistencyError(
                f"{'; '.join(found)}. No weight was changed. Every parameter must take part in the "
                "loss of every leaf, and its hook must run on every rank."
            )
        self._slices = [self._total.take(f"bucket {i}") for i in range(len(self._buckets))]
        parts: dict[str, Tensor] = {}
        for names, own in zip(self._buckets, self._slices, strict=True):
            start = -self._total.slice_index * len(own)
            for name in names:
                part = own[max(start, 0) : max(start + self._numels[name], 0)]
                if len(part):
                    parts[name] = part
                start += self._numels[name]
        return {name: parts[name] for name in self._shapes if name in parts}

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients, whole, bucket by bucket, from what `take` gave every rank; they are
        forgotten here. Every rank reads all of them."""
        while self._slices:
            names, own = self._buckets[len(self._slices) - 1], self._slices.pop()
            vector = self._total.gather(f"bucket {len(self._slices)}", own)
            lengths = [self._numels[name] for name in names]
            for name, piece in zip(names, vector[: sum(lengths)].split(lengths), strict=True):
                yield name, piece.view(self._shapes[name])

    def _send(self) -> None:
        index, names = self._unsent.popleft()
        parts = [self._ready.pop(name).reshape(-1) for name in names]
        if padding := -sum(map(len, parts)) % self._total.world.size:
            parts.append(parts[0].new_zeros(padding))
        # A large matrix is a bucket of its own, and is sent from where it lies.
        self._total.add(f"bucket {index}", parts[0] if len(parts) == 1 else torch.cat(parts))
