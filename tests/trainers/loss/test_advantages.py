import math

import pytest
import torch

from rl_consistency.trainers.advantages import group_advantages, overlong_mask, overlong_penalty


def test_dr_grpo_subtracts_the_group_mean():
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 2.0, 2.0], 4, kind="dr_grpo")
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25, 1.0, -1.0, 0.0, 0.0]
    assert advantages.dtype == torch.float32


def test_grpo_divides_by_the_sample_standard_deviation():
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], 4, eps=0.0)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    with_eps = group_advantages([1.0, 0.0], 2, eps=0.5)
    assert with_eps.tolist() == pytest.approx(
        [0.5 / (math.sqrt(0.5) + 0.5), -0.5 / (math.sqrt(0.5) + 0.5)]
    )


def test_mutant_the_population_standard_deviation_is_seen():
    population = torch.tensor([1.0, 0.0, 0.0, 0.0]).std(correction=0)
    assert group_advantages([1.0, 0.0, 0.0, 0.0], 4, eps=0.0)[0] != 0.75 / population


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, -7.3])
def test_equal_rewards_give_exactly_zero(kind, reward):
    for size in (3, 6, 7, 49):
        assert group_advantages([reward] * size, size, kind=kind).tolist() == [0.0] * size


def test_a_group_is_blind_to_its_neighbours_and_to_the_order_within():
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0)).tolist()
    whole = group_advantages(rewards, 8)
    assert torch.equal(whole[8:16], group_advantages(rewards[8:16], 8))
    assert torch.equal(whole[:8].flip(0), group_advantages(rewards[7::-1], 8))


def test_rewards_may_come_as_a_tensor():
    rewards = torch.tensor([1.0, 0.0])
    assert torch.equal(group_advantages(rewards, 2), group_advantages([1.0, 0.0], 2))


@pytest.mark.parametrize(
    ("rewards", "size", "message"),
    [
        ([1.0], 1, "group of one"),
        ([1.0, 2.0, 3.0], 2, "multiple of group_size 2"),
        ([], 2, "positive multiple"),
        ([1.0, math.nan], 2, "sample 1 is nan"),
        ([math.inf, 1.0], 2, "sample 0 is inf"),
    ],
)
def test_unusable_rewards_are_refused(rewards, size, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, size)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'dr_grpo'"):
        group_advantages([1.0, 0.0], 2, kind="rloo")  # type: ignore[arg-type]


def test_the_overlong_mask_drops_completions_cut_by_length():
    assert overlong_mask(["stop", "length", "stop"]).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="sample 1"):
        overlong_mask(["stop", "eos"])


def test_the_overlong_penalty_falls_over_the_buffer():
    penalty = overlong_penalty([0, 16, 17, 19, 20, 25], max_tokens=20, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert not torch.signbit(penalty[:2]).any()


@pytest.mark.parametrize("buffer", [0, 21])
def test_an_impossible_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match="buffer must be"):
        overlong_penalty([1], max_tokens=20, buffer=buffer)
