import math

import torch

from rl_consistency.parity.drift import Sample, WorstToken, worst_tokens

COMPLETIONS = [[5, 6, 7], [], [8, 9]]
PLACES = [(40, 0), (40, 1), (41, 0)]


def table(rollout, training, **given):
    sides = [[torch.tensor(part) for part in side] for side in (rollout, training)]
    samples = list(map(Sample, COMPLETIONS, PLACES, *sides))
    return worst_tokens(samples, lambda ids: f"<{ids[0]}>", **given)


ROLLOUT = [[-1.0, -2.0, -3.0], [], [-1.0, -1.0]]
TRAINING = [[-1.0, -2.5, -3.25], [], [-1.0, 0.0]]


def test_the_largest_difference_is_first_and_equal_tokens_are_left_out():
    assert table(ROLLOUT, TRAINING) == [
        WorstToken("<9>", 41, 0, 1, -1.0, 0.0, 1.0),
        WorstToken("<6>", 40, 0, 1, -2.0, -2.5, -0.5),
        WorstToken("<7>", 40, 0, 2, -3.0, -3.25, -0.25),
    ]
    assert [row.token for row in table(ROLLOUT, TRAINING, most=2)] == ["<9>", "<6>"]
    assert table(ROLLOUT, ROLLOUT) == []


def test_what_is_not_finite_comes_before_every_difference():
    training = [[math.nan, -2.5, -math.inf], [], [-1.0, 0.0]]
    assert [row.token for row in table(ROLLOUT, training)] == ["<5>", "<7>", "<9>", "<6>"]
    both = [[-1.0, math.nan, -3.0], [], [-1.0, -1.0]]
    assert [row.token for row in table(both, both)] == ["<6>"]


def test_bits_count_not_values():
    rows = table([[0.0, -2.0, -3.0], [], [-1.0, -1.0]], [[-0.0, -2.0, -3.0], [], [-1.0, -1.0]])
    assert [(row.token, row.difference) for row in rows] == [("<5>", 0.0)]
