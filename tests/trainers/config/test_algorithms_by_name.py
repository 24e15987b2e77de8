"""Algorithms, optimizers and schedules by the names people know, and what they may not have."""

import pytest

from rl_consistency.trainers.config.learning_sections import AlgorithmSection, OptimizerSection
from rl_consistency.trainers.config.recipe import load_config, strategy_problems
from rl_consistency.trainers.launch import check_machine
from tests.trainers.config.test_config import DEMO, refusal

GSPO = ["algorithm.name=gspo", "algorithm.loss=gspo"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dr_grpo", {"advantage": "dr_grpo", "loss": "dr_grpo", "clip_high": 0.2}),
        ("dapo", {"loss": "dapo", "clip_low": 0.2, "clip_high": 0.28}),
        ("gspo", {"advantage": "grpo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("cispo", {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        ("rloo", {"advantage": "rloo", "loss": "dr_grpo", "use_kl_in_reward": True}),
        ("reinforce_plus_plus", {"advantage": "reinforce_plus_plus", "use_kl_in_reward": True}),
        ("reinforce_plus_plus_baseline", {"loss": "dapo", "use_kl_in_reward": False}),
    ],
)
def test_a_name_stands_for_keys_of_grpo(name, keys):
    found = AlgorithmSection(name=name)
    assert found.name == "grpo" and {key: getattr(found, key) for key in keys} == keys
    assert (found.dynamic_sampling is not None) == (name == "dapo")
    assert AlgorithmSection.model_validate(found.model_dump()) == found
    assert AlgorithmSection(name=name, clip_high=0.05).clip_high == 0.05


def test_the_demo_has_the_clip_it_had():
    assert (AlgorithmSection().clip_low, AlgorithmSection().clip_high) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss=gspoo"], "'gspo' or 'cispo', got 'gspoo'"),
        (["algorithm.name=gpso"], "'reinforce_plus_plus_baseline' or 'ppo', got 'gpso'; did you"),
        (["algorithm.name=gpso"], "did you mean gspo?"),
        (["algorithm.name=drgrpo"], "did you mean dr_grpo?"),
        (["algorithm.name=Dr. GRPO"], "did you mean dr_grpo?"),
        (["algorithm.name=reinforce"], "did you mean reinforce_plus_plus?"),
        (["algorithm.name=REINFORCE++"], "did you mean reinforce_plus_plus?"),
        (["algorithm.name=reinforce++_baseline"], "mean reinforce_plus_plus_baseline?"),
        (["algorithm.loss=rloo"], "did you mean algorithm.name: rloo?"),
        (["algorithm.advantage=gspo"], "did you mean algorithm.name: gspo?"),
        (
            ["algorithm.name=gspo", "algorithm.loss=dapo"],
            "set loss to gspo too, or leave the name out",
        ),
        ([*GSPO, "algorithm.clip_high=0.2"], "0.2 is a range of single tokens"),
        (["algorithm.loss=gspo", "algorithm.clip_high=0.28"], "0.28 is a range of single tokens"),
        (["algorithm.clip_low=1"], "must be below 1 with loss dapo"),
        (["algorithm.name=ppo", "algorithm.loss=gspo"], "gspo needs one advantage a sequence"),
        (["algorithm.name=ppo", "algorithm.dynamic_sampling={}"], "which ppo has not"),
        (["algorithm.advantage=rloo", "rollout.sampling.n=1"], "n must be at least 2"),
        (["algorithm.dynamic_sampling.max_rounds=0"], "greater than or equal to 1"),
        (["optimizer.name=muon", "training.strategy=fsdp2"], "muon needs whole tensors, and fsdp2"),
        (["optimizer.name=adamw_8bit", "training.strategy=zero3"], "use adamw, or training"),
        (["optimizer.muon.momentum=0.9"], "optimizer.muon: has no meaning with name: adamw"),
        (["optimizer.name=adam"], "'adamw', 'adamw_8bit' or 'muon', got 'adam'"),
        (["optimizer.min_lr=1e-9"], "optimizer.min_lr: schedule constant does not end"),
        (
            ["optimizer.schedule=cosine_with_min_lr"],
            "cosine_with_min_lr needs min_lr or",
        ),
        (
            ["optimizer.schedule=cosine", "optimizer.min_lr=1"],
            "min_lr: 1 must be below",
        ),
        (
            ["optimizer.schedule=linear", "optimizer.min_lr=1e-9", "optimizer.min_lr_ratio=0.1"],
            "optimizer.min_lr_ratio: min_lr says the same",
        ),
    ],
)
def test_a_mistake_is_named(overrides, message):
    assert message in refusal(*overrides)


def test_reinforce_plus_plus_takes_a_group_of_one():
    given = ["algorithm.advantage=reinforce_plus_plus", "rollout.sampling.n=1"]
    assert load_config(DEMO, given).sampling.n == 1


def test_a_launchers_shards_are_refused_too():
    config = load_config(DEMO, ["optimizer.name=muon"])
    assert "muon needs whole tensors" in next(strategy_problems(config, "zero2"))
    assert not list(strategy_problems(config, "replicated"))


def test_without_bitsandbytes_its_extra_is_named(monkeypatch):
    monkeypatch.setattr("rl_consistency.trainers.launch.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"rl-consistency\[8bit\]"):
        check_machine(load_config(DEMO, ["optimizer.name=adamw_8bit"]))


def test_a_minimum_is_a_share_of_the_peak():
    given = {"learning_rate": 2e-3, "schedule": "cosine"}
    assert OptimizerSection(**given, min_lr=5e-4).ends_at == 0.25
    assert OptimizerSection(**given, min_lr_ratio=0.1).ends_at == 0.1
    assert OptimizerSection(**given).ends_at == 0
