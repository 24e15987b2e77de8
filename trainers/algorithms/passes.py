"""How an algorithm passes over the samples of an optimizer step, a group of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rl_consistency.trainers.losses import L
from rl_consistency.trainers.strategies.strategy import Backward, Strategy


def backward_passes(
    ranks: Strategy,
    part: list[int],
    loss: Callable[[list[int]], L],
    keep: Callable[[list[int], L], None] = lambda group, output: None,
) -> Backward:
    """The backward passes of the optimizer step over `part`; `keep` is given what is found."""

    def backward(batch: range, is_filler: bool) -> None:
        group = [part[i] for i in batch]
        output = loss(group)
        ranks.backward(output.loss * 0.0 if is_filler else output.loss)
        if not is_filler:
            keep(group, output)

    return backward


def in_groups(
    samples: Sequence[int], size: int, compute: Callable[[list[int]], Sequence[Tensor]]
) -> dict[int, Tensor]:
    """What `compute` gives of each of the samples, which it takes in groups of at most `size`."""
    found: dict[int, Tensor] = {}
    for start in range(0, len(samples), size):
        group = list(samples[start : start + size])
        found.update(zip(group, compute(group), strict=True))
    return found
