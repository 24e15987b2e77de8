"""A call captured as several CUDA graphs, between which other calls run.

A graph replays its launches with the grids that it was captured with. An op whose grid differs from
call to call stays outside: it interrupts the capture, and is called between two replays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

Between = Callable[[Any], object]
"""Called in each replay with what `replay` was given."""


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

    def replay(self, argument: Any) -> None:
        """Queue all pieces on the current stream, with the calls between them."""
        for graph, between in self._pieces:
            graph.replay()
            if between is not None:
                between(argument)


class _Memory:
    """Memory of a GPU by its address, as `torch.as_tensor` takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
        }


def borrowed(x: Tensor) -> Tensor:
    """A tensor over the memory of x that does not keep it: later captures may be given it.

    Its values are there from the replay that writes them to the next that may. On a CPU x itself.
    """
    if not x.is_cuda:
        return x
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    memory = _Memory(x.data_ptr(), span * x.itemsize)
    return torch.as_tensor(memory, device=x.device).view(x.dtype).as_strided(x.shape, x.stride())


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was missing: the allocator has its own class of error, making a graph none."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


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
