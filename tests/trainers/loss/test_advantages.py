import math

import pytest
import torch

from rl_consistency.trainers.advantages import (
    explained_variance,
    generalized_advantages,
    group_advantages,
    overlong_mask,
    overlong_penalty,
    token_advantages,
    token_rewards,
    whitened,
)


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


def test_rloo_subtracts_the_mean_of_the_others():
    rewards = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    groups = rewards.view(3, 4)
    others = (groups.sum(dim=1, keepdim=True) - groups) / 3  # TRL's RLOOTrainer
    found = group_advantages(rewards, 4, kind="rloo")
    torch.testing.assert_close(found, (groups - others).flatten().float(), rtol=1e-6, atol=0)


LENGTHS = [2, 5, 1, 3]
KL = [[0.1 * i for i in range(n)] for n in LENGTHS]


def whitening(values):
    """As verl's `masked_whiten`, but for its divisor n - 1."""
    return (values - values.mean()) / values.var(correction=0).sqrt()


@pytest.mark.parametrize("kl", [None, KL])
def test_reinforce_plus_plus_normalises_rewards_to_go_over_all_tokens(kl):
    rewards = [1.0, 0.0, 0.5, 2.0]
    given = {"kl": kl, "coefficient": 0.3}
    found = token_advantages("reinforce_plus_plus", rewards, 1, LENGTHS, **given)
    plain = []
    for reward, part, n in zip(rewards, kl or [[0.0] * n for n in LENGTHS], LENGTHS):
        earned = -0.3 * torch.tensor(part, dtype=torch.float64)
        earned[-1] += reward
        plain.append(earned.flip(0).cumsum(0).flip(0))
        assert len(plain[-1]) == n
    wanted = whitening(torch.cat(plain)).float()
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-6, atol=1e-7)
    assert [len(part) for part in found] == LENGTHS


def test_with_a_baseline_the_group_mean_goes_first_and_the_kl_is_of_the_completion():
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    shaped = rewards - 0.3 * torch.tensor([sum(part) for part in KL], dtype=torch.float64)
    centred = (shaped.view(2, 2) - shaped.view(2, 2).mean(dim=1, keepdim=True)).flatten()
    each = torch.repeat_interleave(centred, torch.tensor(LENGTHS))
    kind, given = "reinforce_plus_plus_baseline", {"kl": KL, "coefficient": 0.3}
    found = token_advantages(kind, rewards, 2, LENGTHS, **given)
    torch.testing.assert_close(torch.cat(found), whitening(each).float(), rtol=1e-6, atol=1e-7)
    grouped = token_advantages("rloo", rewards, 2, LENGTHS, **given)
    wanted = (shaped.view(2, 2) - shaped.view(2, 2).flip(1)).flatten()
    torch.testing.assert_close(
        torch.cat(grouped),
        torch.repeat_interleave(wanted, torch.tensor(LENGTHS)).float(),
    )


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, -7.3])
def test_equal_rewards_give_exactly_zero(kind, reward):
    for size in (3, 6, 7, 49):
        assert group_advantages([reward] * size, size, kind=kind).tolist() == [0.0] * size


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_a_completion_without_a_reward_has_no_advantage_and_no_part_in_those_of_others(kind):
    nan = math.nan
    found = group_advantages([1.0, nan, 0.0, 2.0, nan, 3.0, nan, nan, *[nan] * 4], 4, kind=kind)
    first, second = group_advantages([1.0, 0.0, 2.0], 3, kind=kind).split([1, 2])
    assert found.tolist() == [*first.tolist(), 0.0, *second.tolist(), *[0.0] * 8]


@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"])
def test_token_advantages_pass_by_a_completion_without_a_reward(kind):
    lengths, rewards = [2, 3, 1, 2], [1.0, math.nan, 0.0, math.nan]
    given = token_advantages(kind, rewards, 2, lengths, kl=[[0.1] * n for n in lengths])
    assert [part.tolist() for part in given[1::2]] == [[0.0] * 3, [0.0] * 2]
    kept = [[0.1] * 2, [0.1]]
    right = token_advantages("reinforce_plus_plus", [1.0, 0.0], 2, [2, 1], kl=kept)
    if kind == "reinforce_plus_plus":
        assert all(map(torch.equal, given[::2], right))
    none = token_advantages(kind, [math.nan] * 2, 2, [1, 2])
    assert torch.cat(none).tolist() == [0.0] * 3


def test_a_group_is_blind_to_its_neighbours_and_to_the_order_within():
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0)).tolist()
    whole = group_advantages(rewards, 8)
    assert torch.equal(whole[8:16], group_advantages(rewards[8:16], 8))
    assert torch.equal(whole[:8].flip(0), group_advantages(rewards[7::-1], 8))


@pytest.mark.parametrize(
    ("rewards", "size", "message"),
    [
        ([1.0], 1, "group of one"),
        ([1.0, 2.0, 3.0], 2, "multiple of group_size 2"),
        ([], 2, "positive multiple"),
    ],
)
def test_unusable_rewards_are_refused(rewards, size, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, size)


def test_the_overlong_mask_drops_completions_cut_by_length():
    assert overlong_mask(["stop", "length", "stop"]).tolist() == [True, False, True]


def test_the_overlong_penalty_falls_over_the_buffer():
    penalty = overlong_penalty([0, 16, 17, 19, 20, 25], max_tokens=20, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert not torch.signbit(penalty[:2]).any() and penalty.dtype == torch.float64


def naive_gae(rewards, values, gamma, gae_lambda):
    """The definition: advantage[t] = sum over l of (gamma lambda)^l delta[t + l]."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    count = len(rewards)
    return [
        sum((gamma * gae_lambda) ** (i - t) * deltas[i] for i in range(t, count))
        for t in range(count)
    ]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("length", [1, 2, 37])
def test_generalized_advantages_match_their_definition(gamma, gae_lambda, length):
    generator = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, length, generator=generator, dtype=torch.float64).tolist()
    factors = {"gamma": gamma, "gae_lambda": gae_lambda}
    found = generalized_advantages(rewards, values, **factors)
    assert found == pytest.approx(naive_gae(rewards, values, **factors), rel=1e-12, abs=1e-13)


def test_a_value_that_is_not_finite_is_named_by_its_token():
    with pytest.raises(ValueError, match=r"token 1 are \(1.0, nan\); they must be finite"):
        generalized_advantages([0.0, 1.0], [0.0, math.nan], gamma=1.0, gae_lambda=0.5)


def test_the_reward_comes_at_the_last_token_and_the_kl_at_each():
    assert token_rewards(1.0, [0.5, -0.25], 0.5) == [-0.25, 1.125]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_tokens():
    parts = [[1.0, 2.0, 3.0], [10.0]]
    flat = torch.tensor([v for part in whitened(parts) for v in part], dtype=torch.float64)
    assert flat.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert flat.std(correction=0).item() == pytest.approx(1.0, rel=1e-6)


def test_equal_advantages_are_whitened_to_exactly_zero():
    assert whitened([[0.1, 0.1], [0.1]]) == [[0.0, 0.0], [0.0]]


def test_explained_variance_of_a_perfect_a_mean_and_a_worse_critic():
    returns = [[1.0, 3.0], [5.0]]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([[3.0, 3.0], [3.0]], returns) == 0.0
    assert explained_variance([[5.0, 3.0], [1.0]], returns) == -3.0
    assert explained_variance([[1.0, 2.0]], [[0.1, 0.1]]) == 0.0
