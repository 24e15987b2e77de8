"""The share of logprobs that other sequences of the batch change."""

import math

import pytest

from benchmarks.rollout.batch_dependence import Independence, differing_share

ONE = [([1, 2, 3], [-1.0, -2.0, -3.0])]


def test_equal_bits_are_independent_and_one_other_bit_is_not():
    assert differing_share(ONE, ONE) == 0.0
    nan = [([1], [math.nan])]
    assert differing_share(nan, nan) == 0.0
    other = [([1, 2, 3], [-1.0, -2.0 - 2.0**-22, -3.0])]
    assert differing_share(ONE, other) == pytest.approx(1 / 3)
    assert differing_share([([1], [0.0])], [([1], [-0.0])]) == 1.0


def test_what_follows_another_token_is_not_compared():
    other = [([1, 9, 3], [-1.0, -2.0, -7.0])]
    assert differing_share(ONE, other) == 0.5


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        differing_share(ONE, ONE * 2)


def test_the_prompts_stand_among_the_others():
    check = Independence(prompts=3, others=10, new_tokens=4, longest_prompt=64)
    alone, batch, start = check.batches(100)
    assert (len(alone), len(batch), start) == (3, 13, 4)
    assert batch[start : start + 3] == alone
    assert all(8 <= len(prompt) <= 32 for prompt in alone)
    assert all(2 <= len(prompt) <= 64 for prompt in batch)
    assert check.batches(100) == (alone, batch, start)
