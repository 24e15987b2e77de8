"""g = part 0 + part 1 + ... in part order, whichever rank computed a part.

Shapes: vectors [world size * n] -> this rank's slice [n]; one vector per key and part.
Dtypes and rounding points: fp32; each addition rounds.
Order: ORDER below, `leaf_sum`.
Invariant to: number of ranks and nodes, how vectors are cut into keys, when they are added.
Varies with: the number of parts and of their groups.
Errors: TypeError on another dtype, ValueError on a length that the ranks do not divide,
    CollectiveError when a rank is lost.
Cost: a round sends what an fp32 reduce-scatter sends. The carry has 4 / world size bytes per
    element; with groups a second one has 4 / inner group size.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_consistency.distributed.gradient_parts import PartOrder, Round
from rl_consistency.distributed.world import World
from rl_consistency.kernels.core.reduction_order import ReductionOrder

ORDER = ReductionOrder(
    id="leaf_sum",
    version=1,
    cpu="""\
N sequences of an optimizer step, in logical order; G = inner * outer leaves:
leaf l (fp32) = gradient_fold, from zero, of the sequences i with
    floor(l * N / G) <= i < floor((l + 1) * N / G)
group a (fp32) = leaf a * inner; for each further leaf of the group, upward: group += leaf
parameter.grad (fp32) = group 0; for each further group, upward: parameter.grad += group
""",
)


class OrderedSum:
    """Sums of vectors over the parts of a step. Each rank keeps one slice of every sum.

    In each round every rank adds its part's vectors, all ranks the same keys in the same order. A
    rank without a part adds vectors of the right length, which count for nothing. On CUDA the work
    has a stream of its own, and no call waits for the device.
    """

    def __init__(self, world: World, order: PartOrder):
        """Every rank calls it. ValueError if so many ranks cannot share the parts."""
        inner_size = order.inner_size(world.size, world.ranks_per_node)
        self.world = world
        self.rounds = order.rounds(world.rank, world.size, inner_size)
        """Rounds of each step."""
        self._round = self.rounds[0]
        self._inner, self._across = world.split(inner_size)
        self.slice_index = self._inner.rank * self._across.size + self._across.rank
        """Which slice of a vector is this rank's; its rank if there is one group of parts."""
        cuda = world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if cuda else None
        self._sent: deque[tuple[str, Tensor, Callable[[], Tensor]]] = deque()
        self._added: Counter[str] = Counter()
        self._group_carry: dict[str, Tensor] = {}
        self._carry: dict[str, Tensor] = {}

    def step(self) -> Iterator[Round]:
        """The rounds of a step, for the caller's loop. What an unfinished step left is dropped."""
        self._sent.clear()
        self._added.clear()
        self._group_carry.clear()
        self._carry.clear()
        for round in self.rounds:
            self._round = round
            yield round
            with self._own_stream():
                self._fold(0)

    def add(self, key: str, vector: Tensor) -> None:
        """Add this rank's part, [world size * n] fp32, which belongs to the sum from now on."""
        if vector.dtype != torch.float32:
            raise TypeError(f"gradient {key} must be torch.float32, got {vector.dtype}.")
        if vector.dim() != 1 or len(vector) % self.world.size:
            raise ValueError(
                f"gradient {key} must be a vector that {self.world.size} ranks divide, "
                f"got {list(vector.shape)}."
            )
        self._added[key] += 1
        with self._own_stream(vector):
            wait = self._inner.exchange(self._what(key), vector, self._round.senders)
            self._sent.append((key, vector, wait))
            self._fold(1)  # this exchange runs while the one before is added up

    def take(self, key: str) -> Tensor:
        """This rank's slice [n] of a sum, once every round has added to it; it is forgotten."""
        if (added := self._added[key]) != (rounds := len(self.rounds)):
            raise ValueError(f"gradient {key} was added in {added} of {rounds} rounds, not each.")
        with self._own_stream():
            self._fold(0)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.world.device)
            current.wait_stream(self._stream)
            self._carry[key].record_stream(current)
        return self._carry.pop(key)

    @property
    def round_index(self) -> int:
        """Index of the round that takes place, counted from 0."""
        return self._round.index

    @property
    def in_last_round(self) -> bool:
        """Whether sums are complete once this round's parts are added."""
        return self.round_index == len(self.rounds) - 1

    def by_slice(self, vector: Tensor) -> Tensor:
        """A vector whose chunks stand by rank, cut so that each rank's slice is its own chunk."""
        if self._across.size == 1:
            return vector
        chunks = vector.view(self._across.size, self._inner.size, -1)
        return chunks.transpose(0, 1).reshape(-1)

    def gather(self, key: str, part: Tensor) -> Tensor:
        """The whole vector [world size * n] from the slices of all ranks."""
        for group in (self._across, self._inner):
            part = group.all_gather(f"gradient {key}: all-gather", part)
        return part

    def _fold(self, keep: int) -> None:
        """Add up the oldest exchanges until `keep` are under way."""
        while len(self._sent) > keep:
            key, vector, wait = self._sent.popleft()
            _continue(self._group_carry, key, wait())
            if not self._round.groups:
                continue
            # A rank whose group has no part sends nothing, and gives the length.
            group = self._group_carry.pop(key, vector[: len(vector) // self._inner.size])
            what = f"{self._what(key)} of groups"
            _continue(self._carry, key, self._across.exchange(what, group, self._round.groups)())

    def _what(self, key: str) -> str:
        return f"gradient {key}, round {self._round.index + 1} of {len(self.rounds)}: all-to-all"

    @contextmanager
    def _own_stream(self, *used: Tensor) -> Iterator[None]:
        """Run on the sum's stream, after all that the caller has launched."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        for tensor in used:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


def _continue(carries: dict[str, Tensor], key: str, chunks: Tensor) -> None:
    """Left fold of `chunks` [k, n] onto the carry of `key`, from the first chunk if it has none."""
    for chunk in chunks.unbind(0):
        if key in carries:
            carries[key].add_(chunk)
        else:  # one chunk of several would keep the memory of all
            carries[key] = chunk if len(chunks) == 1 else chunk.clone()
