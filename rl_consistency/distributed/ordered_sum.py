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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from rl_consistency.distributed.gradient_parts import PartOrder, Round
from rl_consistency.distributed.world import World
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.numerics.errors import ConsistencyError

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
        for kept in (self._sent, self._added, self._group_carry, self._carry):
            kept.clear()
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
    def in_last_round(self) -> bool:
        """Whether sums are complete once this round's parts are added."""
        return self._round is self.rounds[-1]

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


class GradientBuckets:
    """Sums gradients by name over the parts of a step; see `OrderedSum`.

    In each round of `step`, `put` every gradient of the part; then `take`, and `gather` for whole
    gradients. A bucket is sent when it and those before it are full: all ranks send in one order,
    that of a backward pass. Buckets do not change a bit.
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
        not give, so NaN is sent for it, and `take` reports it."""
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

        TypeError on another dtype, ValueError on an unknown name, another shape or a second time.
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
        ConsistencyError on every rank if a rank did not give a gradient."""
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
