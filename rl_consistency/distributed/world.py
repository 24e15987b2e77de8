"""The processes of a run: which one this is, and collectives that name themselves when they fail.

Vectors travel between devices, over NCCL or gloo. Small facts, such as digests, travel between
hosts, over gloo. There a lost process is a `CollectiveError` whatever the device; over NCCL it can
also be NCCL's watchdog that names the collective, in its log, and ends the process.
"""

from __future__ import annotations

import io
import math
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl_consistency.numerics.errors import ConsistencyError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)


class CollectiveError(ConnectionError):
    """A collective did not complete: another process ended, or did not come within the timeout."""


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks of the world. All of them make the same calls in one order."""

    ranks: range
    rank: int
    """The place of this rank among them."""
    timeout: timedelta = TIMEOUT
    handle: dist.ProcessGroup | None = None
    """The process group of torch; None in a group of one."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """A CollectiveError that says which collective did not complete."""
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"{what} between ranks {', '.join(map(str, self.ranks))}: "
                f"rank {self.ranks[self.rank]} gave up. Another rank ended, or did not come within "
                f"{self.timeout.total_seconds():g} s; its log says why. Resume from the last "
                f"checkpoint. ({str(error).splitlines()[0]})"
            ) from error

    @contextmanager
    def naming_others(self, what: str) -> Iterator[None]:
        """`naming` around collectives of a library; other errors in the block pass as they are."""
        try:
            yield
        except RuntimeError as error:
            # gloo's errors have no class of their own.
            of_gloo = type(error) is RuntimeError and "gloo/transport" in str(error)
            if isinstance(error, dist.DistError) or of_gloo:
                with self.naming(what):
                    raise
            raise

    def exchange(self, what: str, vector: Tensor, senders: int) -> Callable[[], Tensor]:
        """Start to send chunk r of [size * n] to rank r, from each of the first `senders` ranks.

        The vector of others only says how long a chunk is. The caller keeps `vector` until it has
        called the result, which gives chunks [senders, n] in rank order. On CUDA the current stream
        waits for them, elsewhere the host.
        """
        chunks = vector.view(self.size, -1)
        if self.handle is None or not senders:
            return lambda: chunks[:senders]
        sends, received = self.rank < senders, torch.empty_like(chunks[:senders])
        with self.naming(what):
            work = dist.all_to_all_single(
                received,
                chunks if sends else chunks[:0],
                [1] * senders + [0] * (self.size - senders),
                [int(sends)] * self.size,
                group=self.handle,
                async_op=True,
            )

        def wait() -> Tensor:
            with self.naming(what):
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
            return received

        return wait

    def all_gather(self, what: str, part: Tensor) -> Tensor:
        """[n] of every rank -> [size * n], in rank order."""
        if self.handle is None:
            return part
        whole = part.new_empty(self.size * len(part))
        with self.naming(what):
            dist.all_gather_into_tensor(whole, part, group=self.handle)
        return whole


@dataclass(frozen=True, eq=False, kw_only=True)
class World(Group):
    """All processes of a run; as a group they talk between hosts."""

    device: torch.device
    """Where this process computes."""
    ranks_per_node: int = 1

    @classmethod
    def join(
        cls, device: torch.device, timeout: timedelta = TIMEOUT, ranks_per_node: int | None = None
    ) -> World:
        """The ranks of torch's default process group, which all call it; a world of one where there
        is none. `ranks_per_node` is counted by host name if not given."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(range(1), 0, device=device)
        ranks = range(dist.get_world_size())
        handle = _new_group(ranks, timeout, "gloo")
        world = cls(ranks, dist.get_rank(), timeout, handle, device=device)
        if ranks_per_node is None:
            counts = Counter(world.gather("host names", socket.gethostname()))
            ranks_per_node = math.gcd(*counts.values())
        return replace(world, ranks_per_node=ranks_per_node)

    def gather(self, what: str, fact: T) -> list[T]:
        """The facts (plain data, tensors on the CPU) of all ranks, in rank order."""
        if self.handle is None:
            return [fact]
        packed = io.BytesIO()
        _TensorPickler(packed).dump(fact)
        facts: list[Any] = [None] * self.size
        with self.naming(what):
            dist.all_gather_object(facts, packed.getvalue(), group=self.handle)
        return [pickle.loads(each) for each in facts]

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """All ranks leave the block, or none does: the error of one is raised on the others too, if
        it is a ConsistencyError, ValueError, TypeError or OSError. After another they wait in vain.

        Every rank enters it. A collective inside is one that all ranks reach, or none.
        """
        if self.handle is None:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except (ConsistencyError, ValueError, TypeError, OSError) as raised:
            error = raised
        told = None if error is None else (isinstance(error, ConsistencyError), str(error))
        outcomes = self.gather(what, told)
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                broken, text = outcome
                raise (ConsistencyError if broken else ValueError)(f"rank {rank}: {text}")

    def from_first(self, what: str, work: Callable[[], T]) -> T:
        """What `work()` returns (plain data) or raises on rank 0, where alone it runs."""
        fact: Any = None
        with self.agreed(what):
            if self.rank == 0:
                fact = work()
        return self.gather(what, fact)[0]

    def reduce(self, what: str, numbers: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        """Sums or maxima of int64 numbers over all ranks: integers know no order."""
        if self.handle is None:
            return list(numbers)
        totals = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        with self.naming(what):
            dist.all_reduce(totals, op, group=self.handle)
        return totals.tolist()

    def split(self, inner_size: int) -> tuple[Group, Group]:
        """This rank's groups: `inner_size` neighbours, and those with its place among theirs. Every
        rank calls it. `inner_size` divides the number of ranks."""
        inner = [range(first, first + inner_size) for first in range(0, self.size, inner_size)]
        across = [range(place, self.size, inner_size) for place in range(inner_size)]
        return self._own_of(inner), self._own_of(across)

    def _own_of(self, groups: list[range]) -> Group:
        (own,) = (ranks for ranks in groups if self.rank in ranks)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        made = {g: _new_group(g, self.timeout, backend) for g in groups if len(g) > 1}
        return Group(own, own.index(self.rank), self.timeout, made.get(own))


class _TensorPickler(pickle.Pickler):
    """Sends a tensor's own bytes. torch sends its whole storage, of which it may be a small view,
    and opens a file in memory for each: a tenth of a second for the completions of a step."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        content = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (obj.dtype, tuple(obj.shape), content)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _new_group(ranks: range, timeout: timedelta, backend: str) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return cast(dist.ProcessGroup, made)  # a number on ranks outside, which do not use it


def require_same_facts(world: World, facts: Mapping[str, str], *, when: str) -> None:
    """ConsistencyError on every rank, naming the ranks whose texts differ from those of rank 0:
    a fingerprint's entries, digests of recipe and data. `when`: before what."""
    first, *others = world.gather(f"facts compared {when}", dict(facts))
    lines = []
    for rank, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        for name in names[:1]:
            values = f"{other.get(name, 'absent')} != {first.get(name, 'absent')}"
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"rank {rank} differs from rank 0 in {name} ({values}){more}")
    if lines:
        raise ConsistencyError(
            f"{when}: {'; '.join(lines)}. All ranks must have the same versions, devices, "
            "settings, recipe, data and weights."
        )
