"""`rl_consistency.train`: recipes from Python, functions as rewards, several runs in a process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import yaml

import rl_consistency as rlc
from rl_consistency.trainers.config.recipe import ConfigError
from rl_consistency.trainers.rewards import RewardError
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.directory import RunDirectoryError


def length(completion, answer):
    return len(completion) / 9


def varied(prompts, completions, answers, **_):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def as_trl(prompts, completions, completion_ids, answer):
    return [float(len(ids)) for ids in completion_ids]


def quiet(line):
    """Says nothing."""


@pytest.fixture
def train(tiny_run):
    """`rlc.train` of the tiny recipe in a directory of the test's own."""
    return partial(rlc.train, tiny_run.tree(), announce=quiet, training__steps=1)


def test_functions_take_the_place_of_the_recipe_s_rewards(train, tiny_run):
    of_trl = {"function": as_trl, "signature": "trl", "weight": 0.0}
    found = train(rewards=[length, {"function": varied, "weight": 0.5}, "exact_match", of_trl])
    (row,) = found.metrics
    names = {f"reward/{name}" for name in ("length", "varied", "exact_match", "as_trl")}
    assert names <= row.keys() and found.run_dir == tiny_run.directory / "run"
    total = row["reward/length"] + 0.5 * row["reward/varied"] + row["reward/exact_match"]
    assert row["reward/mean"] == pytest.approx(total)
    assert found.summary["steps"] == 1
    assert found.drift["mismatched_tokens"] == 0 < found.drift["tokens"]
    assert f"0 of {found.drift['tokens']} tokens differ" in repr(found)


def test_a_path_a_name_and_overrides_are_taken(train, tiny_run, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny_run.tree()))
    given = {"training": {"steps": 1}, "run__seed": 5, "set": "run.name=mine"}
    first = rlc.train(file, rewards=varied, announce=quiet, **given)
    assert first.summary["name"] == "mine"
    again = train(rewards=[varied], **given, overwrite=True)
    assert again.summary["parameter_digest"] == first.summary["parameter_digest"]
    with pytest.raises(ConfigError, match=r"training.stps: unknown key; did you mean steps\?"):
        rlc.train("grpo_arithmetic_tiny_cpu", training__stps=3)
    with pytest.raises(
        ConfigError, match=r"data.eval_sets.a.pth: unknown key; did you mean path\?"
    ):
        rlc.train("grpo_arithmetic_tiny_cpu", data={"eval_sets": {"a": {"path": "x", "pth": 1}}})
    with pytest.raises(ValueError, match="no recipe 'nothing': give a YAML file, or one of"):
        rlc.train("nothing")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rewards": [3]}, TypeError, "a function or a name is needed, got 3"),
        ({"rewards": [length, partial(length)]}, ValueError, "two functions are named length"),
        ({"rewards": []}, ConfigError, "at least one reward function"),
        ({"rewards": [lambda text: 0]}, RewardError, "'lambda' .*missing a required argument"),
        ({"rewards": ["gms8k"]}, RewardError, "did you mean gsm8k"),
        ({"run__seed__x": 1}, ValueError, "run.seed is the value 3, not a section"),
    ],
)
def test_mistakes_raise_and_leave_no_directory(train, tiny_run, given, error, message):
    with pytest.raises(error, match=message):
        train(**given)
    assert not (tiny_run.directory / "run").exists()


def test_what_is_no_recipe_is_refused():
    with pytest.raises(TypeError, match="recipe must be a path, a name or a dict, got int"):
        rlc.train(3)


def test_runs_follow_one_another_also_in_another_thread_and_under_fsdp2(train):
    threads = torch.get_num_threads()
    first = train(rewards=[varied])
    with pytest.raises(
        RunDirectoryError,
        match=r"run; continue it \(resume\), remove it \(overwrite\), or choose",
    ):
        train(rewards=[varied])
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(train, rewards=[varied], overwrite=True).result()
    assert second.summary["parameter_digest"] == first.summary["parameter_digest"]
    for _ in range(2):
        third = train(rewards=[varied], training__strategy="fsdp2", overwrite=True)
        assert third.summary["parameter_digest"] == first.summary["parameter_digest"]
    assert not torch.distributed.is_initialized() and torch.get_num_threads() == threads
    assert threading.active_count() < 20


def test_a_run_of_functions_is_resumed_with_the_same_source(train):
    def scored(factor):
        source = f"def mine(completion):\n    return len(completion) * {factor}\n"
        found = {}
        exec(source, found)
        return found["mine"]

    whole = train(rewards=[scored(0.5)], training__steps=2)
    train(rewards=[scored(0.5)], run__name="cut", overwrite=True)
    with pytest.raises(CheckpointError, match="reward function mine: "):
        train(rewards=[scored(0.25)], training__steps=2, resume=True)
    with pytest.raises(RewardError, match="unknown reward function 'mine'"):
        train(set=["reward.functions=[{name: mine}]"], resume=True)
    resumed = train(rewards=[scored(0.5)], training__steps=2, resume=True)
    assert resumed.summary["parameter_digest"] == whole.summary["parameter_digest"]
    assert [row["step"] for row in resumed.metrics] == [1, 2]


def test_a_dry_run_writes_nothing(train, tiny_run):
    found = train(rewards=[length], dry_run=True)
    assert found.metrics == [] and found.drift["mismatched_tokens"] == 0
    assert not (tiny_run.directory / "run").exists()
