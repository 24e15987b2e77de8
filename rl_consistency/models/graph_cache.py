"""CUDA graphs of calls, kept by the calls' shapes: decode steps, prefill, and training's layers.

A graph replays its launches with the grids that it was captured with. So calls are padded to a
bucket of rows, and an op whose grid differs from call to call stays outside: it interrupts the
capture, and is called between two replays.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rl_consistency.kernels.core.compile_ahead import require_launches
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row

CAPTURED_AT = 4
"""The ask for a shape that captures it, where it may run op by op: capturing takes as long as three
calls, so at worst the calls before it and the capture take twice what was needed."""

FEWEST_ROWS, FINE_ROWS = 16, 1024
"""Buckets are multiples of the first; from the second on there are eight to a doubling, below two,
since there the time is that of reading the weights."""

OPERATIONS_PER_SECOND = 6e14
"""What a large GPU computes in a second. Where it takes longer for a call than the host does, a
graph gains nothing."""

Between = Callable[[Any], object]
"""Called in each replay with what `replay` was given."""

Shape = TypeVar("Shape", bound=Hashable)
Found = TypeVar("Found")


def bucket_of(rows: int) -> int:
    """The number of rows that a call of `rows` is padded to."""
    octave = max(rows - 1, 1).bit_length()
    step = 1 << (octave - 4) if rows > FINE_ROWS else max(1 << max(octave - 2, 0), FEWEST_ROWS)
    return -(-rows // step) * step


class GraphPieces:
    """Graphs in the order of their capture, and the calls between them.

    All are captured on one stream in one pool of memory, whose tensors the graphs alone keep: a
    piece may write where an earlier one's results were read for the last time.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._pieces: list[tuple[torch.cuda.CUDAGraph, Between | None]] = []

    def capture(self, run: Callable[[], object]) -> None:
        """Capture what `run` launches; it may call `interrupt`."""
        torch.cuda.synchronize(self._stream.device)
        with no_garbage_collection(), torch.cuda.stream(self._stream):
            self._begin()
            try:
                run()
                self._graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has ended, or has failed itself
                    self._graph.capture_end()
                raise
        self._pieces.append((self._graph, None))

    def interrupt(self, between: Between) -> None:
        """End a piece during the capture; `between` is called after it in each replay."""
        self._graph.capture_end()
        self._pieces.append((self._graph, between))
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the trainer may allocate meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def replay(self, argument: Any = None) -> None:
        """Queue all pieces on the current stream, with the calls between them."""
        for graph, between in self._pieces:
            graph.replay()
            if between is not None:
                between(argument)


class GraphPlace:
    """A stream and a pool of memory, which all graphs of a cache are captured in: the pool gives
    memory back to the stream that freed it only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Inside the block calls run where they will be captured. The runs before a capture compile
        kernels and certify products, which a capture must not do."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # What the runs hold may be given away once it is dropped.
            before.wait_stream(self._stream)

    def pieces(self) -> GraphPieces:
        """A call to capture."""
        return GraphPieces(self._pool, self._stream)

    def captured(self, run: Callable[[GraphPieces | None], object]) -> GraphPieces:
        """A call, captured. It is run three times: twice as it is, and into graphs, which it is
        given to interrupt."""
        pieces = self.pieces()
        with certified_to_the_row():
            with self.warming():
                run(None)
                run(None)  # nothing of what the first does is left to do
            pieces.capture(lambda: run(pieces))
        return pieces

    def leave(self) -> None:
        """Wait for the replays of graphs that are dropped now."""
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, eq=False)
class Captured(Generic[Found]):
    """A call, how to run it again as captured, and what keeps alive what its graphs read."""

    call: Found
    replay: Callable[..., None]
    kept: object


class GraphCache(Generic[Shape, Found]):
    """Captured calls by shape, in one pool of memory.

    A subclass says in `_capture` what is captured. Graphs run one after another, each with its own
    memory for its results: they share all memory in between.
    """

    captured_at = 1
    """The ask for a shape that captures it."""
    most_captured = sys.maxsize
    """Shapes that are captured at most."""
    without_memory: str | None = None
    """The warning where memory is missing, of `rows` and a `reason`. Calls of so many rows are not
    captured then. None: the error passes through."""
    place: Callable[[torch.device], Any] = GraphPlace

    def __init__(self) -> None:
        self._captured: dict[Shape, Found] = {}
        self._asked: dict[Shape, int] = {}
        self._room: int | None = None  # rows that there was memory for
        self._place: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def _capture(self, shape: Shape, *context: Any) -> Found | None:
        """What is kept for a shape; None where it is no use."""
        raise NotImplementedError

    def has_room(self, rows: int) -> bool:
        """Whether calls of so many rows have not lacked memory."""
        return self._room is None or rows <= self._room

    def get(self, shape: Shape, rows: int, *context: Any) -> Found | None:
        """What was captured for a shape of so many rows, with `context` for `_capture`; None where
        it has not been asked for often enough, or where there is no room."""
        if shape in self._captured:
            return self._captured[shape]
        if not self.has_room(rows):
            return None
        self._asked[shape] = self._asked.get(shape, 0) + 1
        if self._asked[shape] < self.captured_at or len(self._captured) >= self.most_captured:
            return None
        require_launches("a CUDA graph")
        # A capture cannot take what the allocator holds for others, so it may try twice.
        if self._tried(shape, context) is not None:
            torch.cuda.empty_cache()
            if (reason := self._tried(shape, context)) is not None:
                self.give_up(rows, reason)
        return self._captured.get(shape)

    def _tried(self, shape: Shape, context: tuple[Any, ...]) -> str | None:
        """Capture a shape; why there was no memory for it."""
        try:
            found = self._capture(shape, *context)
        except RuntimeError as error:
            if self.without_memory is None:
                raise
            # The allocator has its own class of error, making a graph none.
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                self._room = 0  # it would fail again
                raise
            if not self._captured:
                self._place = None  # torch has forgotten a pool that no graph uses
            return f"no memory ({error})"
        if found is not None:
            self._captured[shape] = found
        return None

    def in_place(self, device: torch.device) -> Any:
        """Where graphs are captured."""
        if self._place is None:
            self._place = self.place(device)
        return self._place

    def give_up(self, rows: int, reason: str) -> None:
        """Capture no call of so many rows from now on, with a warning."""
        self._room = rows - 1
        assert self.without_memory is not None
        warnings.warn(self.without_memory.format(rows=rows, reason=reason), stacklevel=2)

    def drop(self) -> None:
        """Forget all graphs: what they read by address has moved."""
        place, self._place = self._place, None  # torch forgets a pool that no graph uses
        if place is not None and self._captured:
            place.leave()
        self._captured.clear()
        self._asked.clear()
        self._room = None


def borrowed(x: Tensor) -> Tensor:
    """A tensor over the memory of x that does not keep it: later captures may be given it.

    Its values are there from the replay that writes them to the next that may. On a CPU x itself.
    """
    if not x.is_cuda:
        return x
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    place = {"data": (x.data_ptr(), False), "shape": (span * x.itemsize,)}
    memory = SimpleNamespace(__cuda_array_interface__={"version": 3, "typestr": "|u1", **place})
    return torch.as_tensor(memory, device=x.device).view(x.dtype).as_strided(x.shape, x.stride())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection may free another engine's memory, which invalidates a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
