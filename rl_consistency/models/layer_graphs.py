"""Training through CUDA graphs, where the host would take longer than the GPU.

A step of a small model launches some two thousand kernels, each for a few microseconds of work.
The layers are captured for a number of rows, which batches are padded to, and replayed forward and
backward. No bit moves: the graphs hold the ops that run without them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import (  # pyright: ignore[reportMissingImports]
    _top_saved_tensors_default_hooks,
)

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core.autograd import once_differentiable
from rl_consistency.kernels.core.torch_op import watched
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.matmul.audit import withdrawn_since
from rl_consistency.models.captured_layers import (
    CapturedGradients,
    CapturedLayers,
    Layers,
    LayersPlace,
)
from rl_consistency.models.graph_cache import (
    CAPTURED_AT,
    OPERATIONS_PER_SECOND,
    GraphCache,
    bucket_of,
)
from rl_consistency.models.modules import LayerCall, is_unobserved
from rl_consistency.numerics.strict import current

HOST_SECONDS = 5e-3
"""What the host takes for a layer forward and backward, op by op (4 to 7 ms on three hosts)."""

MOST_CAPTURED = 32
"""Numbers of rows that are captured at most."""

MOST_MOVES = 3
"""How often the weights may move before nothing more is captured."""

MOST_MEMORY = 1 / 3
"""The share of a GPU's memory that activations may take in graphs. They keep it between steps."""

_op_by_op: ContextVar[bool] = ContextVar("layers_op_by_op", default=False)


@contextmanager
def layers_op_by_op() -> Iterator[None]:
    """Inside the block no layer is captured or replayed: who looks into a pass sees its ops."""
    token = _op_by_op.set(True)
    try:
        yield
    finally:
        _op_by_op.reset(token)


class _Pass:
    """A forward pass through graphs, until it is `done`: gone backward, or dropped."""

    done = False


class LayerGraphs(GraphCache[int, CapturedLayers]):
    """The captured layers of one decoder, by their number of rows.

    All lie in one pool of memory, so one forward pass at a time has its activations there. Another
    pass that comes before it has gone backward runs op by op.
    """

    captured_at, most_captured = CAPTURED_AT, MOST_CAPTURED
    without_memory = (
        "training steps of {rows} rows or more are not captured as CUDA graphs: {reason}. They run "
        "op by op, with the same bits and more work for the host."
    )
    place = LayersPlace
    device_type = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._model: _Model | None = None
        self._addresses: list[Any] = []
        self._row_bytes = 0.0  # of activations
        self._gradients: CapturedGradients | None = None
        self._moves = 0
        self._lock = threading.Lock()
        """Held while graphs are looked for and replayed, since they share their memory."""
        self._latest: weakref.ref[_Pass] | None = None
        """The pass whose activations lie in the pool."""

    def run(
        self, modules: Sequence[Any], layers: Layers, hidden: Tensor, call: LayerCall, state: Any
    ) -> Tensor:
        """`layers(hidden, call)`, the same bits, replayed where that pays.

        `modules` are what runs in it, layers first; `state` is equal where nothing that the forward
        reads was changed.
        """
        if self._lock.acquire(blocking=False):  # else another thread replays
            try:
                if self._covers(hidden, call, state) and not self._is_busy():
                    captured = self._found(modules, state, layers, hidden, call)
                    if captured is not None and self._model is not None:
                        given = call.attention_layout, self, captured, self._model.parameters
                        trained = captured.gradients.parameters
                        return _Replayed.apply(hidden, *call.position_embeddings, *given, *trained)
                self._make_room(hidden.shape[1])
            finally:
                self._lock.release()
        return layers(hidden, call)

    def _found(self, modules: Sequence[Any], state: Any, *call: Any) -> CapturedLayers | None:
        """What was captured for `call`: layers, hidden states, `LayerCall`; None: not yet."""
        if self._model is None or self._model.state != state:
            self.drop()
            self._model, self._moves = _Model(state, modules), 0
        if (addresses := self._model.addresses()) != self._addresses:
            self._moves += len(self._captured) > 0
            room = self._room
            self.drop()
            self._addresses, self._room = addresses, room
            if self._moves > MOST_MOVES:
                self.give_up(1, "weights were moved or frozen again and again")
                self._moves = 0
        rows = bucket_of(call[1].shape[1])
        if rows > self._model.most_rows or not self.has_room(rows):
            return None
        if not torch.is_grad_enabled():
            return self._captured.get(rows)
        return self.get(rows, rows, *call)

    def _covers(self, hidden: Tensor, call: LayerCall, state: Any) -> bool:
        """Whether a call may run through graphs at all."""
        return (
            hidden.device.type == self.device_type
            and type(call.attention_layout) is PackedSequences
            and hidden.dtype != torch.float16
            and not state.hooked
            and not current().stock
            and not _op_by_op.get()
            and not watched()
            and not torch.is_anomaly_enabled()  # it reads every gradient
            and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
            and not torch.is_autocast_enabled(self.device_type)
            and _top_saved_tensors_default_hooks(False) is None
        )

    def _is_busy(self) -> bool:
        latest = None if self._latest is None else self._latest()
        return latest is not None and not latest.done

    def drop(self) -> None:
        """Forget all graphs, and give their memory back."""
        place = self._place
        super().drop()
        self._gradients = self._latest = None
        if place is not None:
            torch.cuda.empty_cache()

    def _capture(
        self, rows: int, layers: Layers, hidden: Tensor, call: LayerCall
    ) -> CapturedLayers | None:
        """The layers captured; None where they cannot be, or take too much memory."""
        assert self._model is not None
        if not (buffers := self._model.buffers()):
            self._room = 0
            return None
        self._gradients = self._gradients or CapturedGradients(buffers)
        found = CapturedLayers(rows, hidden, call.position_embeddings, self._gradients)
        place = self.in_place(hidden.device)
        found.capture(layers, place)
        taken, share = place.taken()
        if share > MOST_MEMORY:
            del found
            self.give_up(rows, f"{taken / 2**30:.1f} GiB of activations")
            return None
        self._row_bytes = max(self._row_bytes, taken / rows)
        return found

    def give_up(self, rows: int, reason: str) -> None:
        """Drop all graphs, since one pool holds them; smaller ones are captured again."""
        self.drop()
        super().give_up(rows, reason)

    def _make_room(self, rows: int) -> None:
        """Drop all graphs, for good, if a pass of so many rows op by op would lack their memory."""
        lasting = self._captured and torch.is_grad_enabled() and not self._is_busy()
        if lasting and rows * self._row_bytes > self._place.free():
            self.give_up(1, "larger steps need the memory")


class _Model:
    """What is captured, in one state of the model's forward."""

    def __init__(self, state: Any, modules: Sequence[nn.Module]) -> None:
        self.state, self._modules = state, modules
        self.parameters = [p for module in modules for p in module.parameters()]
        of_a_layer = sum(parameter.numel() for parameter in modules[0].parameters())
        # A pass of more rows takes the GPU longer than the host.
        self.most_rows = int(HOST_SECONDS * OPERATIONS_PER_SECOND / (6 * max(of_a_layer, 1)))

    def addresses(self) -> list[Any]:
        """Where the parameters lie, which are trained, and the products withdrawn so far."""
        found: list[Any] = [(p.data_ptr(), p.requires_grad) for p in self.parameters]
        return [*found, *withdrawn_since(0)]

    def buffers(self) -> list[GradientBuffer]:
        """Gradient buffers of all trained parameters; none at all if one lacks a buffer of its own
        or has several uses, or a call of a module is observed."""
        found: list[GradientBuffer] = []
        for module in (part for each in self._modules for part in each.modules()):
            # The layers themselves are plain, or they would not run here.
            call = type(module).__call__ if module in self._modules else nn.Module.__call__
            trained = [x for x in module.named_parameters(recurse=False) if x[1].requires_grad]
            buffers = getattr(module, "_gradient_buffers", {})
            own = [b for n, p in trained if (b := buffers.get(n)) is not None and b.parameter is p]
            if not is_unobserved(module, call) or len(own) < len(trained):
                return []
            found += own
        return found if all(buffer.uses == 1 for buffer in found) else []


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, cos, sin, layout, graphs, captured, read, *trained):
        ctx.places = [parameter.data_ptr() for parameter in read]
        # Autograd refuses to go backward once any of them was written to.
        ctx.save_for_backward(hidden, cos, sin, *read)
        ctx.layout, ctx.graphs, ctx.captured = layout, graphs, captured
        ctx.own = _Pass()
        graphs._latest = weakref.ref(ctx.own)
        return captured.forward(hidden, (cos, sin), layout)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        hidden, cos, sin, *read = ctx.saved_tensors
        graphs, captured, layout = ctx.graphs, ctx.captured, ctx.layout
        if [parameter.data_ptr() for parameter in read] != ctx.places:
            raise ValueError(
                "weights were moved to other memory between forward and backward. Move them before "
                "the forward pass, or patch(cuda_graphs=False)."
            )
        found: list[Tensor] = []

        def replay() -> None:
            found.append(captured.backward(grad_outputs[0], layout))

        with graphs._lock:
            if ctx.own.done or graphs._latest is None or graphs._latest() is not ctx.own:
                # Another pass has the pool, or this one went backward before: compute again.
                captured.forward(hidden, (cos, sin), layout)
                graphs._latest = weakref.ref(ctx.own)
            ctx.own.done = True
            nodes = [node for node, _ in ctx.next_functions[-len(captured.gradients.parameters) :]]
            gradients = captured.gradients.fold(ctx._sequence_nr(), nodes, replay)
        return found[0], None, None, None, None, None, None, *gradients
