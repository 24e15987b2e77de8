"""Guesses of the next tokens, for a step to verify: exact speculative decoding.

A draft d_0..d_{k-1} is computed behind the last token in one step, which samples k + 1 tokens
t_0..t_k as plain decoding would after each prefix. t_0 always holds; t_{j+1} holds as long as
d_j = t_j. The keyed random stream gives each token at its position (claim C1), so the tokens kept
are those of plain decoding at any temperature: a drafter changes only the number of steps.
Source: Leviathan et al., speculative decoding (2023); Saxena, prompt lookup decoding (2023).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Protocol

MAX_DRAFT = 7  # longest draft: a step of 8 tokens per sequence

DRAFT_LENGTHS = (1, 3, MAX_DRAFT)
"""Lengths asked for. With the last token, 3 and 7 fill the captured widths 4 and 8."""

SHORTEST_REST, LONGEST_REST, LONGEST_WAIT = 2, 64, 8
"""Tokens decoded plainly after a failed attempt, doubled with each further failure; at most after
wrong drafts; and at most after drafts with nothing to propose, which cost less."""


class DraftState(Protocol):
    """What a drafter keeps of one sequence."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that now follow the sequence; never guesses."""

    def propose(self, most: int) -> Sequence[int]:
        """At most `most` ids of the model's vocabulary, likely to come next; may be empty."""
        ...


class Drafter(Protocol):
    """Makes the states of all sequences of an engine."""

    def start(self, token_ids: Sequence[int]) -> DraftState:
        """A state that has taken in `token_ids`."""
        ...


class PromptLookupDrafter:
    """Proposes what followed the latest earlier occurrence of the last n tokens, longest n first.

    It is often right where text is copied: edits, quotes, code, repetition. [5, 6, 7, 8, 5, 6]
    proposes 7, 8, and then goes on in its own proposal with 5, 6, 7, 8, ... n runs from `max_ngram`
    down to `min_ngram`.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)

    def start(self, token_ids: Sequence[int]) -> DraftState:
        return _NgramIndex(self._sizes, token_ids)


class _NgramIndex:
    """Where each n-gram of a sequence was last followed by something; O(1) per token."""

    def __init__(self, sizes: range, token_ids: Sequence[int]) -> None:
        self._sizes = sizes
        self._token_ids: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position behind it
        self.append(token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        known = self._token_ids
        for token_id in token_ids:
            # Entered when its successor arrives: the sequence's own end is never found.
            end = len(known)
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(known[end - size : end])] = end
            known.append(token_id)

    def propose(self, most: int) -> Sequence[int]:
        known, end = self._token_ids, len(self._token_ids)
        found = (self._next.get(tuple(known[end - size :])) for size in self._sizes if size <= end)
        source = next((position for position in found if position is not None), None)
        return () if source is None else list(islice(cycle(known[source:]), most))


class Speculator:
    """One sequence's drafts, as long as they have lately been right.

    A draft accepted in full makes the next one longer (`most` is 1 to 7); one of which less than
    half was accepted makes it shorter. After a failure at the shortest length, or with nothing to
    propose, the sequence decodes plainly for a while, which doubles until a draft is accepted.
    """

    def __init__(self, drafter: Drafter, most: int, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self._state: DraftState | None = None
        self._num_seen = 0
        self._lengths = sorted({min(length, most) for length in DRAFT_LENGTHS})
        self._level = min(1, len(self._lengths) - 1)
        self._rest, self._resume_at = SHORTEST_REST, 0

    def length(self, num_tokens: int) -> int:
        """Length of the draft wanted behind `num_tokens` tokens; 0 is none."""
        return self._lengths[self._level] if num_tokens >= self._resume_at else 0

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """A draft behind all known tokens; ValueError if the drafter gives too many or no ids. It
        may keep and change the lists that it is given."""
        name = type(self._drafter).__name__
        if self._state is None:
            self._state = state = self._drafter.start(list(token_ids))
            if not all(callable(getattr(state, call, None)) for call in ("append", "propose")):
                raise TypeError(
                    f"{name}.start() gave {state!r}, which has no append() and propose()"
                )
        elif self._num_seen < len(token_ids):
            self._state.append(list(token_ids[self._num_seen :]))
        self._num_seen = len(token_ids)
        draft = self._checked(self._state.propose(most), most)
        if len(draft) > most:
            raise ValueError(f"{name} proposed more than the {most} tokens that were asked for")
        if not draft:
            self._pause(len(token_ids), LONGEST_WAIT)
        return draft

    def observe(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """Learn how a draft fared; `num_tokens` are known now."""
        if num_accepted:
            self._rest = SHORTEST_REST
        if num_accepted == num_drafted:
            self._level = min(self._level + 1, len(self._lengths) - 1)
        elif 2 * num_accepted < num_drafted:
            if self._level == 0:
                self._pause(num_tokens, LONGEST_REST)
            self._level = max(self._level - 1, 0)

    def _checked(self, proposed: Sequence[int], most: int) -> tuple[int, ...]:
        try:
            draft = tuple(map(_token_id, islice(proposed, most + 1)))  # it may have no end
        except TypeError:
            draft = (-1,)
        if min(draft, default=0) < 0 or max(draft, default=0) >= self._vocab_size:
            raise ValueError(
                f"{type(self._drafter).__name__} proposed {proposed!r}; a draft must be ids of the "
                f"model's vocabulary of {self._vocab_size}"
            )
        return draft

    def _pause(self, num_tokens: int, longest: int) -> None:
        self._resume_at = num_tokens + min(self._rest, longest)
        self._rest = min(2 * self._rest, LONGEST_REST)


def _token_id(value: object) -> int:
    """The value as an int, of whatever library; -1 for a truth value."""
    is_truth = "bool" in str(getattr(value, "dtype", type(value)))
    return -1 if is_truth else operator.index(value)  # type: ignore[arg-type]


def num_accepted(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafted tokens hold: those before the first that differs from the one sampled."""
    pairs = zip(draft, sampled, strict=False)
    return next((i for i, (guess, token_id) in enumerate(pairs) if guess != token_id), len(draft))
