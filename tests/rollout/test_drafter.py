"""Prompt lookup proposes what followed before; the speculator asks for it while it pays."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rl_consistency.rollout.drafter import (
    LONGEST_REST,
    LONGEST_WAIT,
    MAX_DRAFT,
    SHORTEST_REST,
    PromptLookupDrafter,
    Speculator,
    num_accepted,
)

VOCAB = 50


def proposed(token_ids, most=4, **sizes):
    return list(PromptLookupDrafter(**sizes).start(token_ids).propose(most))


def test_nothing_is_proposed_where_nothing_recurs():
    assert proposed([1, 2, 3, 4]) == [] and proposed([1]) == [] and proposed([]) == []
    assert proposed([1, 2, 3, 2]) == []  # one token is too short a run
    assert proposed([1, 2, 3, 2], 1, min_ngram=1) == [3]


def by_search(token_ids, most, max_ngram, min_ngram):
    """The same by looking through the whole sequence."""
    for size in range(max_ngram, min_ngram - 1, -1):
        last = token_ids[len(token_ids) - size :]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(token_ids) >= size and token_ids[end - size : end] == last:
                draft = list(token_ids)
                for position in range(end, end + most):
                    draft.append(draft[position])
                return draft[len(token_ids) :]
    return []


def test_the_index_finds_what_a_search_finds():
    rng = random.Random(3)
    found = 0
    for _ in range(200):
        max_ngram = rng.randint(1, 4)
        sizes = {"max_ngram": max_ngram, "min_ngram": rng.randint(1, max_ngram)}
        known = [rng.randrange(4) for _ in range(rng.randrange(8))]
        state = PromptLookupDrafter(**sizes).start(known)
        for _ in range(20):
            new = [rng.randrange(4) for _ in range(rng.randrange(4))]
            state.append(new)
            known += new
            most = rng.randint(1, 7)
            assert list(state.propose(most)) == by_search(known, most, **sizes)
            found += bool(by_search(known, most, **sizes))
    assert found > 1000


@pytest.mark.parametrize("sizes", [(0, 1), (3, 0), (2, 3)])
def test_sizes_out_of_order_are_refused(sizes):
    with pytest.raises(ValueError, match="need 1 <= min_ngram <= max_ngram"):
        PromptLookupDrafter(max_ngram=sizes[0], min_ngram=sizes[1])


class Counting:
    """Proposes a given draft and records what it is told."""

    def __init__(self, draft=(1,) * MAX_DRAFT):
        self.draft = draft
        self.seen: list[int] = []
        self.num_started = 0

    def start(self, token_ids):
        self.num_started += 1
        self.seen = list(token_ids)
        return self

    def append(self, token_ids):
        self.seen += token_ids

    def propose(self, most):
        return self.draft[:most]


def test_a_state_takes_in_every_token_once_and_late():
    drafter = Counting()
    speculator = Speculator(drafter, 7, VOCAB)
    assert drafter.num_started == 0  # nothing is spent on a sample that never asks
    known = [3, 4]
    for new in ([], [5], [6, 7]):
        known += new
        speculator.propose(known, 3)
        assert (drafter.seen, drafter.num_started) == (known, 1)


@pytest.mark.parametrize(
    ("most", "widths"), [(7, [3, 7, 7]), (3, [3, 3, 3]), (5, [3, 5, 5]), (1, [1, 1, 1])]
)
def test_drafts_grow_while_all_of_them_holds(most, widths):
    speculator = Speculator(Counting(), most, VOCAB)
    seen = []
    for num_tokens in (10, 20, 30):
        seen.append(speculator.length(num_tokens))
        speculator.observe(num_tokens, seen[-1], seen[-1])
    assert seen == widths


def test_drafts_shrink_and_then_pause_longer_and_longer_while_they_fail():
    speculator, num_tokens = Speculator(Counting(), 7, VOCAB), 0
    speculator.observe(num_tokens, 3, 3)
    widths, rests = [], []
    for _ in range(9):
        start = num_tokens
        while not (width := speculator.length(num_tokens)):
            num_tokens += 1
        widths.append(width)
        rests.append(num_tokens - start)
        num_tokens += 1
        speculator.observe(num_tokens, width, 0)
    assert widths == [7, 3, *[1] * 7]
    assert rests == [0, 0, 0, 2, 4, 8, 16, 32, 64] and rests[-1] == LONGEST_REST
    while not speculator.length(num_tokens):
        num_tokens += 1
    speculator.observe(num_tokens, 1, 1)  # a probe that holds: drafts grow again
    assert speculator.length(num_tokens) == 3


def test_half_a_draft_keeps_its_length():
    speculator = Speculator(Counting(), 7, VOCAB)
    speculator.observe(10, 3, 2)
    assert speculator.length(10) == 3


def test_with_nothing_to_propose_it_is_tried_again_soon():
    speculator, num_tokens = Speculator(Counting(()), 7, VOCAB), 0
    rests = []
    for _ in range(6):
        assert speculator.propose([0] * num_tokens, 3) == ()
        start = num_tokens
        while not speculator.length(num_tokens):
            num_tokens += 1
        rests.append(num_tokens - start)
    assert rests == [SHORTEST_REST, 4, *[LONGEST_WAIT] * 4]


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        ([1] * 4, "Giving proposed more than the 3 tokens"),
        *(([3, bad], "Giving proposed .* of 50") for bad in (VOCAB, -1, 10**6, 1.5, "a", None)),
        (None, "Giving proposed None; a draft must be ids"),
    ],
)
def test_a_drafter_that_proposes_too_much_or_no_tokens_is_refused(proposed, message):
    class Giving(Counting):
        def propose(self, most):
            return proposed

    with pytest.raises(ValueError, match=message):
        Speculator(Giving(), 7, VOCAB).propose([1], 3)


def test_a_drafter_may_propose_integers_of_any_kind():
    for draft in (torch.tensor([3, 4]), np.array([3, 4])):
        proposed = Speculator(Counting(draft), 7, VOCAB).propose([1], 3)
        assert proposed == (3, 4) and {type(token_id) for token_id in proposed} == {int}


@pytest.mark.parametrize(
    ("draft", "sampled", "count"),
    [
        ((), [5], 0),
        ((5,), [5, 6], 1),
        ((4,), [5, 6], 0),
        ((5, 6, 7), [5, 6, 7, 8], 3),
        ((5, 6, 7), [5, 9, 7, 8], 1),  # right again behind a wrong one: its prefix is another
    ],
)
def test_guesses_hold_up_to_the_first_wrong_one(draft, sampled, count):
    assert num_accepted(draft, sampled) == count
