import pytest

from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.launch import check_launch
from tests.trainers.config.test_config import ROOT, refusal

PPO = ROOT / "recipes" / "ppo_arithmetic_tiny_cpu.yaml"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("algorithm.name=reinforce", "algorithm.name: input should be 'grpo' or 'ppo'"),
        ("algorithm.ppo.gamma=1.01", "algorithm.ppo.gamma: input should be less than or equal"),
        ("algorithm.ppo.gamma=-0.1", "algorithm.ppo.gamma: input should be greater than or"),
        ("algorithm.ppo.gae_lambda=2", "algorithm.ppo.gae_lambda: input should be less than or"),
        ("algorithm.ppo.gae_lambda=nan", "algorithm.ppo.gae_lambda: input should be"),
        ("algorithm.ppo.value_clip=0", "algorithm.ppo.value_clip: input should be greater than 0"),
        ("algorithm.ppo.value_clip=-1", "algorithm.ppo.value_clip: input should be greater than 0"),
        ("algorithm.ppo.critic_learning_rate=0", "algorithm.ppo.critic_learning_rate: input sho"),
        ("algorithm.ppo.lam=1", "algorithm.ppo.lam: unknown key; "),
        ("algorithm.updates_per_rollout=512", "algorithm.updates_per_rollout: 512 does not divide"),
        ("algorithm.advantage=dr_grpo", "algorithm.advantage: ppo takes advantages from its cri"),
        ("training.strategy=zero2", "training.strategy: zero2 shards no critic, which ppo needs"),
        ("training.strategy=fsdp2", "training.strategy: fsdp2 shards no critic, which ppo needs"),
        ("algorithm.name=grpo", "algorithm.ppo: has no meaning with name: grpo; leave it out"),
    ],
)
def test_a_setting_that_ppo_cannot_have_is_refused_by_name(setting, problem):
    assert problem.lower() in refusal(setting, recipe=PPO).lower()


def test_a_strategy_that_the_launcher_asks_for_is_refused_too(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="fsdp2 shards no critic, which ppo needs"):
        check_launch(load_config(PPO))


def test_ppo_needs_no_group():
    sampling = "rollout.sampling={n: 1, max_tokens: 16}"
    assert load_config(PPO, [sampling]).sampling.n == 1
    assert "rollout.sampling: n must be at least 2" in refusal(sampling)
