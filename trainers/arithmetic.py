"""A generated, verifiable task: chained sums answered with their running totals.

    prompt "3+5+2+8="   completion "8,10,18"   answer "18"

Every step of a completion is a small addition, so a tiny model learns the form in a few supervised
steps. The worked examples it learns from may be imperfect (`target_errors`), which leaves something
to gain from reinforcement: the reward only asks whether the final sum is right. A problem is a pure function
of (seed, split, index). Training and evaluation never share a sum: the text of a sum, and nothing
else, decides which of the two it belongs to.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, count
from typing import Literal

from rl_consistency.trainers.data import Example, keyed_integer

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
    target_errors: float = 0.0,
) -> Example:
    """Problem `index` of `split`: `num_terms` (at least 2) terms from 1 to `max_value`.

    Each running total of the target is off by one to three with probability `target_errors`; the
    answer is always right.
    """
    check_parameters(num_terms, max_value)
    for attempt in count():
        terms = [
            1 + keyed_integer(seed, "arithmetic", split, index, attempt, place) % max_value
            for place in range(num_terms)
        ]
        prompt = "+".join(map(str, terms)) + "="
        if split_of(prompt) == split:
            break
    totals = list(accumulate(terms))[1:]
    shown = [
        total + _error(seed, split, index, place, target_errors)
        for place, total in enumerate(totals)
    ]
    return Example(
        id=index, prompt=prompt, answer=str(totals[-1]), target=",".join(map(str, shown))
    )


def _error(seed: int, split: Split, index: int, place: int, share: float) -> int:
    """0, or with probability `share` a number from 1 to 3."""
    drawn = keyed_integer(seed, "arithmetic error", split, index, place)
    return 1 + drawn % 3 if (drawn >> 11) < share * 2.0**53 else 0


def problems(
    seed: int,
    split: Split,
    size: int,
    *,
    num_terms: int,
    max_value: int,
    target_errors: float = 0.0,
) -> list[Example]:
    """The first `size` problems of `split`."""
    make = partial(
        problem,
        seed,
        split,
        num_terms=num_terms,
        max_value=max_value,
        target_errors=target_errors,
    )
    return [make(index) for index in range(size)]


def split_of(prompt: str) -> Split:
    """The split that the sum with this text belongs to, whatever the seed."""
    return "eval" if keyed_integer("arithmetic split", prompt) % EVAL_SHARE == 0 else "train"


def check_parameters(num_terms: int, max_value: int) -> None:
    """ValueError unless sums of these sizes are many enough for two disjoint splits."""
    if num_terms < 2 or max_value < 1:
        raise ValueError(
            f"num_terms must be at least 2 and max_value at least 1, got {num_terms}, {max_value}"
        )
    if max_value**num_terms < 64:
        raise ValueError(
            f"{num_terms} terms up to {max_value} make only {max_value**num_terms} sums, too few "
            "for two disjoint splits: raise num_terms or max_value"
        )
