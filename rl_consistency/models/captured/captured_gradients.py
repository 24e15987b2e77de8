"""Gradients that graphs fold into: accumulators at fixed addresses, lent to one pass after another.

A graph continues the accumulators it was captured with. Before a replay they hold what the pass
goes on from, and afterwards they are what it hands to autograd. From the second micro-batch of a
step on `.grad` lies in them already, and nothing is copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.gradient_fold.backward_passes import adds_to_gradient
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, filled

ELSEWHERE = "Call optimizer.zero_grad() and leave .grad in place, or patch(cuda_graphs=False)."


class CapturedGradients:
    """The accumulators of some parameters, of one use each."""

    def __init__(self, buffers: Sequence[GradientBuffer]) -> None:
        self.parameters = [buffer.parameter for buffer in buffers]
        self._buffers = buffers
        self._own = [filled(parameter, zeroed=True) for parameter in self.parameters]
        self._alone = [_references(own) for own in self._own]
        self._places = {own.data_ptr() for own in self._own}

    @contextmanager
    def folded_into(self) -> Iterator[None]:
        """Have the folds inside the block, which is captured, continue the accumulators."""
        with ExitStack() as stack:
            for buffer, own in zip(self._buffers, self._own, strict=True):
                stack.enter_context(buffer.folding_into(own))
            yield

    def fold(
        self, op: int, nodes: Sequence[Any], replay: Callable[[], None]
    ) -> list[Tensor | None]:
        """Run `replay` in the backward pass that goes on; what a backward function returns for each
        parameter. `op` is autograd's number of that function, `nodes` where the gradients go."""
        zeroed: list[Tensor] = []
        loads, stores, restores = _Copies(), _Copies(), _Copies()
        if {own.data_ptr() for own in self._own} != self._places:
            raise ValueError(f"the memory of a gradient was resized. {ELSEWHERE}")
        results: list[Tensor | None] = []
        for i, (buffer, own, node) in enumerate(zip(self._buffers, self._own, nodes, strict=True)):
            accumulates = adds_to_gradient(node) if self.parameters[i].requires_grad else None
            found = None if accumulates is None else buffer.begin(op, accumulates)
            if found is not None and found.data_ptr() == own.data_ptr():
                results.append(found)
                continue
            if found is not None and found.data_ptr() in self._places:
                raise ValueError(f"a parameter was given the gradient of another one. {ELSEWHERE}")
            # Somebody has what an earlier pass was given: `.grad`, or a caller who kept it.
            lent = _references(own) != self._alone[i]
            if lent:
                kept = own.clone()
            if found is None:
                zeroed.append(own)
            else:
                loads.add(own, found)
            result = found
            if accumulates is None:
                result = None
            elif found is not None:
                stores.add(found, own)
            elif lent:
                result = torch.empty_like(own)
                stores.add(result, own)
            else:
                result = own.data  # an alias with a version of its own, which autograd looks at
            results.append(result)
            if lent:
                restores.add(own, kept)
        try:
            for group in by_dtype(zeroed):
                torch._foreach_zero_(group)  # pyright: ignore[reportPrivateImportUsage]
            loads.run()
            replay()
            stores.run()
        finally:
            restores.run()  # whatever happened, what others hold is theirs
        return [
            None if result is None else buffer.finish(result)
            for buffer, result in zip(self._buffers, results, strict=True)
        ]


class _Copies:
    """Copies that are made one after another, in the order in which they were added."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, to: Tensor, source: Tensor) -> None:
        self._pairs.append((to, source))

    def run(self) -> None:
        for to, source in self._pairs:
            to.copy_(source)


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists that one launch each can take."""
    found: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.dtype].append(tensor)
    return list(found.values())


def _references(tensor: Tensor) -> int:
    """Tensors over this memory, and what it takes to ask."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
