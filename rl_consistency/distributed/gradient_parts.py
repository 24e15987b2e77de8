"""Which rank computes which part of an optimizer step, and in which round.

A step's sequences, in logical order, are cut into parts. The number of parts is a setting of the
run, so the gradient's order depends on it and on nothing that a launch can change: the number of
ranks, of nodes and the micro-batch size are schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Round:
    """One part of each rank, as one rank sees it."""

    index: int
    """Index of the round, counted from 0; all ranks have the same number of rounds."""
    part: int | None
    """The part that this rank computes; None if none is left for it."""
    senders: int
    """Number of ranks of this rank's inner group that have a part: the first ones."""
    groups: int
    """Number of inner groups that complete a group of parts, the first ones; 0 before its last
    round."""


@dataclass(frozen=True)
class PartOrder:
    """`inner * outer` parts: groups of `inner` parts are folded first, then the groups.

    Example: `PartOrder(8)` is a fold over 8 parts; `PartOrder(4, 2)` adds the sum of parts 4 to 7
    to the sum of parts 0 to 3. Groups keep most of the traffic inside a node.
    """

    inner: int
    outer: int = 1

    def __post_init__(self) -> None:
        if min(self.inner, self.outer) < 1:
            raise ValueError(f"numbers of leaves must be positive, got {self}.")

    @property
    def count(self) -> int:
        """Parts of a step."""
        return self.inner * self.outer

    def parts(self, num_sequences: int) -> list[range]:
        """The sequences of each part, by their logical index; ValueError if there are too few."""
        if num_sequences < self.count:
            raise ValueError(
                f"an update of {num_sequences} sequences cannot be cut into {self.count} leaves. "
                f"Train on more, or set consistency.gradient_leaves to at most {num_sequences}."
            )
        return cut(num_sequences, self.count)

    def micro_batches(
        self, num_sequences: int, part: int | None, micro_batch_size: int
    ) -> list[range]:
        """The sequences of each forward pass of a part; as many passes for every part, or None.

        An empty range is filler, which keeps the ranks in step where a forward pass gathers
        weights: run any sequence of this rank with weight zero. No order depends on this cut.
        ValueError on a micro-batch larger than a part.
        """
        parts = self.parts(num_sequences)
        largest = max(map(len, parts))
        if not 1 <= micro_batch_size <= largest:
            raise ValueError(
                f"a micro-batch of {micro_batch_size} sequences does not fit into a leaf: "
                f"{num_sequences} sequences in {self.count} leaves are at most {largest} per leaf. "
                f"Set training.micro_batch_size to 1 to {largest}, or use fewer leaves."
            )
        own, passes = range(0) if part is None else parts[part], -(-largest // micro_batch_size)
        return [own[run.start : run.stop] for run in cut(len(own), passes)]

    def inner_size(self, world_size: int, ranks_per_node: int) -> int:
        """Ranks that share the parts of one group: neighbours, inside a node if possible.
        ValueError on a number of ranks for which there is no such number."""
        fitting = [
            size
            for size in range(1, world_size + 1)
            if world_size % size == 0 and size <= self.inner and world_size // size <= self.outer
        ]
        if not fitting:
            products = {i * o for i in range(1, self.inner + 1) for o in range(1, self.outer + 1)}
            raise ValueError(
                f"{world_size} processes cannot share {self.inner} x {self.outer} gradient leaves. "
                f"Allowed numbers of processes: {', '.join(map(str, sorted(products)))}. Start as "
                "many, or set consistency.gradient_leaves higher (which is another order)."
            )
        return max(fitting, key=lambda size: (ranks_per_node % size == 0, size))

    def rounds(self, rank: int, world_size: int, inner_size: int) -> list[Round]:
        """The rounds of a step. Rank r of W has part jW + r in round j where there is one group."""
        across, found = world_size // inner_size, []
        firsts = range(0, self.outer, across), range(0, self.inner, inner_size)
        for first_group, first in product(*firsts):
            group, place = first_group + rank // inner_size, first + rank % inner_size
            works, last = group < self.outer, first + inner_size >= self.inner
            found.append(
                Round(
                    index=len(found),
                    part=group * self.inner + place if works and place < self.inner else None,
                    senders=min(inner_size, self.inner - first) if works else 0,
                    groups=min(across, self.outer - first_group) if last else 0,
                )
            )
        return found


def cut(count: int, parts: int) -> list[range]:
    """`count` things in `parts` runs whose lengths differ by at most one."""
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
