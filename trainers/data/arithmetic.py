"""A generated, verifiable task: chained sums answered with their running totals.

    prompt "3+5+2+8="   completion "8,10,18"   answer "18"

A tiny model learns the form in a few supervised steps. A policy that imitates worked examples which
stop early (`incomplete_targets`) does so too; reinforcement learning, which rewards the final sum,
corrects that. A problem is a pure function of (seed, split, index). Training and evaluation never
share a sum: its text alone decides which of the two it belongs to.
"""

from __future__ import annotations

from itertools import accumulate, count
from typing import Any, Literal

from rl_consistency.trainers.data.examples import Example, keyed_integer

Split = Literal["train", "eval"]
EVAL_SHARE = 8
"""One sum in this many belongs to evaluation."""


def problem(
    seed: int,
    split: Split,
    index: int,
    *,
    num_terms: int,
    max_value: int,
    incomplete_targets: float = 0.0,
) -> Example:
    """Problem `index` of `split`: `num_terms` (at least 2) terms from 1 to `max_value`.

    With probability `incomplete_targets` the target stops before its last running total.
    """
    for attempt in count():
        terms = [
            1 + keyed_integer(seed, "arithmetic", split, index, attempt, place) % max_value
            for place in range(num_terms)
        ]
        prompt = "+".join(map(str, terms)) + "="
        if split_of(prompt) == split:
            break
    totals = list(accumulate(terms))[1:]
    drawn = keyed_integer(seed, "arithmetic target", split, index)
    incomplete = (drawn >> 11) < incomplete_targets * 2.0**53
    shown = totals[: 1 + drawn % (len(totals) - 1)] if incomplete and len(totals) > 1 else totals
    target = ",".join(map(str, shown))
    return Example(id=index, prompt=prompt, answer=str(totals[-1]), target=target)


def problems(seed: int, split: Split, size: int, **sizes: Any) -> list[Example]:
    """The first `size` problems of `split`; see `problem`."""
    return [problem(seed, split, index, **sizes) for index in range(size)]


def split_of(prompt: str) -> Split:
    """The split that the sum with this text belongs to, whatever the seed."""
    return "eval" if keyed_integer("arithmetic split", prompt) % EVAL_SHARE == 0 else "train"
