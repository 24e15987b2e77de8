"""Graphs on a CPU: the ops of a capture, recorded, and run again into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_consistency.models.graph_cache import Between
from rl_consistency.models.layer_graphs import LayerGraphs


class RecordedPieces(TorchDispatchMode):
    """Stands for `GraphPieces`. What an op returned is kept, so no memory is used twice. A capture
    writes nothing: what its ops wrote into older memory is put back."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, ...] | Between] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = zip(func._schema.arguments, args, strict=False)
        for argument, value in (*written, *((None, v) for v in kwargs.values())):
            if argument is None or (argument.alias_info and argument.alias_info.is_write):
                self._keep(_tensors(value))
        found = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, found))
        self._made |= {x.untyped_storage().data_ptr() for x in _tensors(found)}
        return found

    def _keep(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            place = x.untyped_storage().data_ptr()
            if place not in self._made and place not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self._before[place] = whole, whole.clone()

    def capture(self, run: Callable[[], object]) -> None:
        with self:
            run()
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()

    def interrupt(self, between: Between) -> None:
        self._calls.append(between)

    @torch.no_grad()
    def replay(self, argument: Any = None) -> None:
        for call in self._calls:
            if not isinstance(call, tuple):
                call(argument)
                continue
            func, args, kwargs, kept = call
            written = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
            for to, value in zip(_tensors(kept), _tensors(func(*args, **kwargs)), strict=True):
                if to.untyped_storage().data_ptr() not in written:  # no view, and not in place
                    to.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class RecordedPlace:
    """Stands for `GraphPlace`."""

    def __init__(self, device: torch.device) -> None:
        pass

    def warming(self) -> Any:
        return nullcontext()

    def pieces(self) -> Any:
        return RecordedPieces()

    def use(self) -> Any:
        return nullcontext()

    def taken(self) -> tuple[int, float]:
        return 0, 0.0

    def free(self) -> int:
        return 1 << 40

    def leave(self) -> None:
        pass


class CountedLayerGraphs(LayerGraphs):
    """`replays` counts forward passes that gradients follow."""

    replays = 0

    def run(self, modules, layers, hidden, call, state):
        found = super().run(modules, layers, hidden, call, state)
        self.replays += type(found.grad_fn).__name__.startswith("_Replayed")
        return found


class RecordedLayerGraphs(CountedLayerGraphs):
    """Those of a model on a CPU."""

    place, device_type = RecordedPlace, "cpu"


def recorded(model: Any) -> CountedLayerGraphs:
    """Graphs for a patched model: on a GPU real ones."""
    kind = CountedLayerGraphs if model.device.type == "cuda" else RecordedLayerGraphs
    graphs = model.model.layer_graphs = kind()
    return graphs
