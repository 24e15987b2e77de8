"""The layers of a decoder and its final norm, captured forward and backward for a number of rows.

Attention lies between the graphs, since its grids differ from batch to batch. Everything else is
captured as autograd runs it, so a replay computes what the ops would compute one by one. Rows past
those of a batch hold zeros, and so do their gradients: they add nothing to any fold.

Graphs fold into accumulators at fixed addresses, lent to one pass after another. A graph continues
those it was captured with. Before a replay they hold what the pass goes on from, and afterwards
they are what it hands to autograd. From the second micro-batch of a step on `.grad` lies in them
already, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import (
    attention_gradients_into,
    attention_into,
    empty_results,
)
from rl_consistency.kernels.core.autograd import once_differentiable
from rl_consistency.kernels.gradient_fold.gradient_buffer import (
    GradientBuffer,
    adds_to_gradient,
    filled,
)
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.graph_cache import GraphPieces, GraphPlace, borrowed
from rl_consistency.models.modules import LayerCall

Layers = Callable[[Tensor, LayerCall], Tensor]
"""(hidden [1, R, H], call) -> hidden [1, R, H] after the layers and the final norm."""

_Copy = tuple[Tensor, Tensor]
"""To where, and of what."""

ELSEWHERE = "Call optimizer.zero_grad() and leave .grad in place, or patch(cuda_graphs=False)."


class LayersPlace(GraphPlace):
    """Where the layers of a model are captured; it knows what memory that takes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._reserved = self._kept = 0
        self._last: Any = None  # event of the latest replay

    @contextmanager
    def warming(self) -> Iterator[None]:
        """The runs before a capture; what they took is given back."""
        # A capture takes no memory that the allocator keeps for others, or for this stream.
        torch.cuda.empty_cache()
        self._reserved = torch.cuda.memory_reserved(self._device)
        try:
            with super().warming():
                yield
        finally:
            torch.cuda.empty_cache()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside the block replays are queued, behind those on other streams."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last = stream.record_event()

    def taken(self) -> tuple[int, float]:
        """Bytes that the latest capture took, and the share of the device's memory."""
        taken = torch.cuda.memory_reserved(self._device) - self._reserved
        self._kept += taken
        return taken, taken / torch.cuda.get_device_properties(self._device).total_memory

    def free(self) -> int:
        """Bytes that the allocator could give out."""
        unused = torch.cuda.memory_reserved(self._device) - self._kept
        unused -= torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused


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
        zeroed, results = list[Tensor](), list[Tensor | None]()
        loads, stores, restores = list[_Copy](), list[_Copy](), list[_Copy]()
        if {own.data_ptr() for own in self._own} != self._places:
            raise ValueError(f"the memory of a gradient was resized. {ELSEWHERE}")
        for i, (buffer, own, node) in enumerate(zip(self._buffers, self._own, nodes, strict=True)):
            accumulates = adds_to_gradient(node) if self.parameters[i].requires_grad else None
            found = None if accumulates is None else buffer.begin(op, accumulates)
            place = None if found is None else found.data_ptr()
            if place == own.data_ptr():
                results.append(found)
                continue
            if place in self._places:
                raise ValueError(f"a parameter was given the gradient of another one. {ELSEWHERE}")
            # Somebody has what an earlier pass was given: `.grad`, or a caller who kept it.
            lent = _references(own) != self._alone[i]
            if lent:
                restores.append((own, own.clone()))
            if found is not None:
                loads.append((own, found))
                stores.append((found, own))
            else:
                zeroed.append(own)
                if accumulates is not None and lent:
                    found = torch.empty_like(own)
                    stores.append((found, own))
                elif accumulates is not None:
                    found = own.data  # an alias with a version of its own, which autograd looks at
            results.append(found)
        try:
            for group in by_dtype(zeroed):
                torch._foreach_zero_(group)  # pyright: ignore[reportPrivateImportUsage]
            _copy(loads)
            replay()
            _copy(stores)
        finally:
            _copy(restores)  # whatever happened, what others hold is theirs
        return [
            None if result is None else buffer.finish(result)
            for buffer, result in zip(self._buffers, results, strict=True)
        ]


def _copy(pairs: Iterable[_Copy]) -> None:
    for to, source in pairs:
        to.copy_(source)


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists that one launch each can take."""
    ordered = sorted(tensors, key=lambda tensor: str(tensor.dtype))
    return [list(group) for _, group in groupby(ordered, key=lambda tensor: tensor.dtype)]


def _references(tensor: Tensor) -> int:
    """Tensors over this memory, and what it takes to ask."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class CapturedLayers:
    """One number of rows. What a forward replay leaves is gone after the backward replay."""

    def __init__(
        self, rows: int, hidden: Tensor, angles: Sequence[Tensor], gradients: CapturedGradients
    ) -> None:
        self.gradients = gradients
        # Rows of a batch and, behind them, zeros.
        self._hidden = hidden.new_zeros(1, rows, hidden.shape[2])
        self._gradient = torch.zeros_like(self._hidden)
        self._angles = [angle.new_zeros(rows, *angle.shape[1:]) for angle in angles]

    def capture(self, layers: Layers, place: LayersPlace) -> None:
        """Capture both passes of `layers`, after runs that compile kernels and certify products."""
        forward, backward = place.pieces(), place.pieces()
        found: list[Tensor] = []
        with (
            torch.enable_grad(),
            # In autograd's own threads nothing would be captured.
            torch.autograd.set_multithreading_enabled(False),
            certified_to_the_row(),
            self.gradients.folded_into(),
        ):
            with place.warming():
                for _ in range(2):
                    self._go_backward(self._run(layers))
            forward.capture(lambda: found.append(self._run(layers, forward, backward)))
            self._result = borrowed(found[0])
            backward.capture(lambda: found.append(self._go_backward(found[0])))
            self._dhidden = borrowed(found[1])
        self._forward, self._backward, self._place = forward, backward, place

    def _run(self, layers: Layers, *seam: GraphPieces) -> Tensor:
        """The layers as autograd records them; attention lies between the graphs of the `seam`,
        forward and backward. None: nothing is captured."""
        self._leaf = self._hidden.detach().requires_grad_()

        def attend(q: Any, k: Any, v: Any, _: int, scale: float, window: int | None) -> Tensor:
            numbers = {"scale": scale, "window": window}
            return _Attention.apply(q, k, v, seam or (None, None), numbers)

        cos, sin = self._angles
        return layers(self._leaf, LayerCall((cos, sin), PackedSequences.interrupted(attend)))

    def _go_backward(self, result: Tensor) -> Tensor:
        # For parameters autograd would wait for the streams that they were used on. Without asking
        # for them they are folded all the same.
        return torch.autograd.grad(result, self._leaf, self._gradient)[0]

    def forward(self, hidden: Tensor, angles: Sequence[Tensor], layout: PackedSequences) -> Tensor:
        """[1, r, H] of hidden states [1, r, H] and angles [r, D/2] each."""
        with self._place.use():
            _load(self._hidden[0], hidden[0])
            for memory, values in zip(self._angles, angles, strict=True):
                _load(memory, values)
            self._forward.replay(layout)
            return self._result[:, : hidden.shape[1]].clone()

    def backward(self, gradient: Tensor, layout: PackedSequences) -> Tensor:
        """The gradient of the hidden states [1, r, H]; the parameters' go where they are folded."""
        with self._place.use():
            _load(self._gradient[0], gradient[0])
            self._backward.replay(layout)
            return self._dhidden[:, : gradient.shape[1]].clone()


def _load(memory: Tensor, values: Tensor) -> None:
    """Queue a copy of rows, and zeros behind them."""
    memory[: len(values)].copy_(values)
    memory[len(values) :].zero_()


class _Attention(torch.autograd.Function):
    """Memory for attention's results and gradients, which it fills between two graphs."""

    @staticmethod
    def forward(ctx, q, k, v, seam, numbers):
        results = empty_results(q)
        _between(seam[0], attention_into, results, (q, k, v), numbers)
        ctx.save_for_backward(q, k, v, *results)
        ctx.backward_graph, ctx.numbers = seam[1], numbers
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        q, k, v, *results = ctx.saved_tensors
        gradients = tuple(x.new_empty(x.shape) for x in (q, k, v))
        operands = (grad_outputs[0], q, k, v, tuple(results))
        _between(ctx.backward_graph, attention_gradients_into, gradients, operands, ctx.numbers)
        return *gradients, None, None


def _between(graph: GraphPieces | None, op: Any, into: Any, operands: Any, numbers: Any) -> None:
    """Have `op` fill `into` in each replay, between two graphs; zeros where nothing is captured."""
    if graph is None:
        for tensor in into:
            tensor.zero_()
    else:
        into, *operands = tree_map(borrowed, (into, *operands))
        graph.interrupt(partial(op, into, *operands, **numbers))
