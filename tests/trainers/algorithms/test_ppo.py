import pytest
import torch

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.trainers.algorithms import ppo
from rl_consistency.trainers.algorithms.critic import CriticModel
from rl_consistency.trainers.losses import value_loss
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from tests.trainers.distributed.runs import LEAVES

PPO = {
    "algorithm.name": "ppo",
    "algorithm.kl_coefficient": 0.05,
    "algorithm.updates_per_rollout": 2,
    "algorithm.epochs_per_rollout": 2,
    "consistency.value_check_every": 1,
}
METRICS = {
    "value/loss",
    "value/clip_fraction",
    "value/explained_variance",
    "value/mean",
    "value/gradient_norm",
    "reward/kl",
    "policy/kl/k1",
    "policy/kl/k3",
    "policy/kl/rollout",
    "consistency/critic_digest",
    "time/critic_seconds",
}


def trajectory(rows):
    names = ("rollout/weights_digest", "consistency/critic_digest", "value/loss", "loss")
    return [tuple(row[name] for name in names) for row in rows if row["step"] > 0]


def require_no_drift(summary):
    assert summary["consistency/mismatched_tokens"] == 0 < summary["consistency/tokens"]
    assert summary["consistency/value_check/mismatched_values"] == 0
    assert summary["consistency/value_check/values"] == summary["consistency/tokens"]
    assert summary["consistency/importance_ratio/max"] == 1.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trajectories that others are compared with."""
    return {}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"training.micro_batch_size": 1},
        {"training.micro_batch_size": 3, "training.layout": "padded"},
        {"policy.gradient_checkpointing": True},
        {"consistency.value_check_every": 2, "consistency.gradient_check_every": 1},
    ],
    ids=["micro-batch 1", "padded", "checkpointing", "checks"],
)
def test_how_the_work_is_cut_changes_neither_policy_nor_critic(plain, tiny_run, dtype, changes):
    common = PPO | {"policy.dtype": dtype, "training.steps": 2}
    if dtype not in plain:
        summary, rows = tiny_run.of_its_own("plain", **common)
        require_no_drift(summary)
        plain[dtype] = trajectory(rows)
    assert trajectory(tiny_run(**common | changes)[1]) == plain[dtype]


def test_three_steps_log_every_metric_and_move_both_models(tiny_run):
    summary, rows = tiny_run(**PPO)
    require_no_drift(summary)
    assert all(row.keys() >= METRICS for row in rows)
    assert summary["critic_digest"] == rows[-1]["consistency/critic_digest"]
    for name in ("rollout/weights_digest", "consistency/critic_digest"):
        assert len({row[name] for row in rows}) == 3
    assert rows[0]["reward/kl"] == 0.0 != rows[1]["reward/kl"]
    assert all(row["value/gradient_norm"] > 0 for row in rows)


def test_the_kl_is_in_the_reward_and_not_in_the_loss(tiny_run):
    runs = [tiny_run.of_its_own(str(k), **PPO | {"algorithm.kl_coefficient": k}) for k in (0, 0.5)]
    (_, without), (_, given) = runs
    assert without[0]["loss"] == given[0]["loss"]  # as yet every log-ratio is 0
    assert without[1]["loss"] != given[1]["loss"]
    assert "reward/kl" not in without[1]


def test_mutant_values_that_depend_on_padding_stop_the_run(tiny_run, monkeypatch):
    real = CriticModel.values

    def padded(self, sequences, prompt_lengths, layout="packed"):
        factor = 1 + layout.endswith("padded") * 2**-20
        return [values * factor for values in real(self, sequences, prompt_lengths, layout)]

    monkeypatch.setattr(CriticModel, "values", padded)
    with pytest.raises(ConsistencyError, match="values of the critic depend on how the batch was"):
        tiny_run(**PPO)


def test_the_critic_s_gradients_are_checked_on_a_first_update(tiny_run):
    changes = {"training.steps": 3, "consistency.gradient_check_every": 2}
    summary, rows = tiny_run(**PPO | changes)
    key = "consistency/critic_gradient_check"
    found = {row["step"]: row for row in rows if f"{key}/passed" in row}
    assert list(found) == [1, 3]
    for row in found.values():
        assert row[f"{key}/passed"] and row[f"{key}/mismatched_elements"] == 0
        assert row["consistency/gradient_check/passed"]
    assert summary["consistency/gradient_check/checks"] == 4


def test_a_critic_s_loss_that_depends_on_the_cut_stops_the_run(tiny_run, monkeypatch):
    """A mean over the tokens at hand, whose values are right."""

    def at_hand(values, old, returns, weights, *, clip):
        return value_loss(
            values, old, returns, torch.full_like(weights, 1 / len(weights)), clip=clip
        )

    monkeypatch.setattr(ppo, "value_loss", at_hand)
    tiny_run.of_its_own("unchecked", **PPO | {"consistency.gradient_check_every": 0})
    with pytest.raises(ConsistencyError, match=r"critic: gradients depend on how .* first in "):
        tiny_run(**PPO | {"consistency.gradient_check_every": 1})


def test_a_value_that_differs_fails_a_run_that_only_records(tiny_run, monkeypatch):
    real, calls = ppo.PPOTrainer._values, []

    def again(self, *given):
        calls.append(1)
        values = real(self, *given)
        return values if len(calls) % 2 else [v + 1e-3 for v in values]

    monkeypatch.setattr(ppo.PPOTrainer, "_values", again)
    summary, _ = tiny_run(**PPO | {"consistency.on_drift": "record"})
    checked = summary["consistency/value_check/values"]
    assert summary["consistency/value_check/mismatched_values"] == checked > 0


@pytest.mark.parametrize("file", ["critic.safetensors", "critic_optimizer.safetensors"])
def test_a_checkpoint_with_a_damaged_critic_is_refused(tiny_run, file):
    tiny_run(**PPO | {"training.steps": 1})
    damaged = tiny_run.directory / "run" / "checkpoints" / "step_000001" / file
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{file} is missing, truncated or damaged"):
        tiny_run(**PPO | {"training.steps": 1}, resume=True)


def test_a_run_of_grpo_is_not_continued_with_ppo(tiny_run):
    tiny_run(**{"training.steps": 1})
    with pytest.raises(CheckpointError, match=r'algorithm\.name: "ppo" != "grpo"'):
        tiny_run(**PPO | {"training.steps": 1}, resume=True)


def critic_digest_of(world, *trees):
    from rl_consistency.trainers.config.recipe import RunConfig
    from rl_consistency.trainers.run import train

    runs = [train(RunConfig.model_validate(tree), announce=lambda line: None) for tree in trees]
    return [(run["parameter_digest"], run["critic_digest"]) for run in runs]


@pytest.mark.thorough
def test_two_processes_end_with_the_policy_and_the_critic_of_one(run_ranks, tiny_run):
    found = []
    for size in (1, 2):
        own = {"run.output_dir": str(tiny_run.directory / str(size))}
        tree = tiny_run.tree(**PPO | LEAVES | {"algorithm.updates_per_rollout": 1} | own)
        found += run_ranks(size, critic_digest_of, tree)
    assert found[0] == found[1] == found[2]
