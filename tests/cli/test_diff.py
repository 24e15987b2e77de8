import json
import shutil

import pytest

from rl_consistency.cli import main as main_module
from rl_consistency.cli.diff import _made
from rl_consistency.trainers import hooks
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train
from rl_consistency.trainers.strategies.strategy import Replicated
from tests.cli.test_train import RECIPE

BROKEN = "model.layers.0.mlp.up_proj.weight"

MADE = {
    "initial weights": ("digests", "initial_weights"),
    "tokens of the rollout": ("digests", "tokens"),
    "logprobs of the rollout": ("digests", "logprobs"),
    "rewards": ("metrics", "reward/arithmetic"),
    "logprobs in training": ("digests", "training_logprobs"),
    "loss": ("metrics", "policy/clip_fraction"),
    "gradients": ("digests", "gradients"),
    "norm of the gradients": ("metrics", "gradient_norm"),
    "learning rate": ("metrics", "learning_rate"),
    "weights": ("digests", "weights"),
}
"""Quantities of a step in causal order, and where a run keeps them."""


def run_recipe(directory):
    sections = {"run": RECIPE["run"] | {"output_dir": str(directory)}, "training": {"steps": 3}}
    config = RunConfig.model_validate(
        RECIPE | sections | {"consistency": {}, "tracking": {"console": False}}
    )
    train(config, announce=lambda line: None)
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "b")


@pytest.fixture
def diff(capsys):
    """Status and what was printed of `diff` of two directories."""

    def run(*arguments):
        status = main_module.main(["diff", *map(str, arguments)])
        return status, capsys.readouterr()

    return run


def alter(directory, file, change, *, keep=lambda step: True):
    """Change the rows of one of a run's files in place; drop those that are not kept."""
    path = directory / f"{file}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if keep(row["step"])))


def set_at(step, name, part=None):
    def change(row):
        if row["step"] == step:
            values, key = (row, name) if part is None else (row[name], part)
            values[key] = "0" * 32 if isinstance(values[key], str) else values[key] + 1

    return change


def break_gradients(monkeypatch):
    """From the second step on, one parameter's gradient is another one."""
    real, calls = Replicated.norm, []

    def norm(self, gradients):
        calls.append(gradients)
        if len(calls) > 1:
            gradients[BROKEN].add_(0.01)
        return real(self, gradients)

    monkeypatch.setattr(Replicated, "norm", norm)


def test_two_runs_of_a_recipe_are_equal_in_all_steps(whole, diff, tmp_path):
    status, said = diff(whole, run_recipe(tmp_path / "b"))
    assert status == 0
    assert said.out.splitlines()[2:] == ["equal in all 3 common steps, 1 to 3"]


def test_the_step_and_the_parameter_of_a_wrong_gradient_are_named(
    whole, diff, tmp_path, monkeypatch
):
    break_gradients(monkeypatch)
    status, said = diff(whole, run_recipe(tmp_path / "b"))
    assert status == 1
    verdict, *table = said.out.splitlines()[2:]
    assert verdict == "equal up to step 1; step 2 differs, first in: gradients"
    found = {line[:27].strip(): line[27:] for line in table}
    assert found.pop("gradients") == f"1 of 13 differ, first {BROKEN}"
    assert BROKEN in found.pop("weights")
    assert found.pop("norm of the gradients") == "1 of 1 differ, first gradient_norm"
    assert set(found.values()) == {"equal"} and "tokens of the rollout" in found


def test_digests_that_do_not_read_their_tensor_name_no_parameter(
    whole, diff, tmp_path, monkeypatch
):
    """Negative control."""
    real = hooks.each_digest
    monkeypatch.setattr(hooks, "each_digest", lambda given: dict.fromkeys(real(given), "same"))
    right = run_recipe(tmp_path / "a")
    break_gradients(monkeypatch)
    _, said = diff(right, run_recipe(tmp_path / "b"))
    assert "step 2 differs, first in: norm of the gradients" in said.out
    assert BROKEN not in said.out


@pytest.mark.parametrize("first", MADE)
def test_of_all_that_differs_in_a_step_the_earliest_cause_is_named(whole, copy, diff, first):
    step = 1 if first == "initial weights" else 2
    for quantity in list(MADE)[list(MADE).index(first) :]:
        file, name = MADE[quantity]
        part = BROKEN if "weights" in quantity or quantity == "gradients" else None
        alter(copy, file, set_at(step, name, part))
    alter(copy, "digests", set_at(3, "tokens"))
    status, said = diff(whole, copy)
    until = "no step is equal" if step == 1 else "equal up to step 1"
    assert status == 1 and f"{until}; step {step} differs, first in: {first}\n" in said.out


def test_where_a_rollout_has_several_updates_the_mean_loss_follows_the_first_gradients(
    whole, copy, diff
):
    alter(copy, "metrics", set_at(2, "loss"))
    alter(copy, "digests", set_at(2, "gradients", BROKEN))
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("epochs_per_rollout: 1", "epochs_per_rollout: 2"))
    _, said = diff(whole, copy)
    assert "recipe  algorithm.epochs_per_rollout: 1 != 2\n" in said.out
    assert "step 2 differs, first in: gradients\n" in said.out


def test_a_run_without_digests_is_compared_by_its_metrics_and_said_to_be(whole, copy, diff):
    (copy / "digests.jsonl").unlink()
    status, said = diff(whole, copy)
    assert status == 0 and f"{copy}: digests.jsonl has no row of 3 steps" in said.out
    alter(copy, "metrics", set_at(2, "consistency/gradient_digest"))
    status, said = diff(copy, whole)
    assert status == 1 and "equal up to step 1; step 2 differs, first in: gradients\n" in said.out
    assert "gradients                differ\n" in said.out and "tokens of" not in said.out


def test_other_recipes_and_fingerprints_are_named_first(copy, diff, tmp_path):
    changed = RECIPE | {"optimizer": {"learning_rate": 2e-2}}
    other = tmp_path / "c"
    config = RunConfig.model_validate(
        changed
        | {"run": {"name": "other", "num_threads": 1, "seed": 5, "output_dir": str(other)}}
        | {"training": {"steps": 1}, "consistency": {}, "tracking": {"console": False}}
    )
    train(config, announce=lambda line: None)
    status, said = diff(copy, other)
    assert status == 1
    lines = said.out.splitlines()[2:]
    assert "recipe  run.seed: 3 != 5" in lines
    assert "recipe  optimizer.learning_rate: 0.01 != 0.02" in lines
    assert any(line.startswith("fingerprint  policy's weights: ") for line in lines)
    assert not any("run.name" in line or "output_dir" in line for line in lines)
    assert "no step is equal; step 1 differs, first in: initial weights" in lines
    shutil.rmtree(other / "checkpoints")
    assert "fingerprint  not compared" in diff(copy, other)[1].out


def test_a_section_against_null_is_one_line(copy, diff, whole):
    read, text = (copy / "config.yaml"), (copy / "config.yaml").read_text()
    section = "{project: p, mode: offline, tags: [a]}"
    read.write_text(text.replace("  wandb: null\n", f"  wandb: {section}\n"))
    for runs, told in (((whole, copy), "null != {"), ((copy, whole), '"} != null')):
        _, printed = diff(*runs)
        (line,) = [line for line in printed.out.splitlines() if line.startswith("recipe")]
        assert line.startswith("recipe  tracking.wandb: ") and told.strip('"}') in line


def test_the_result_is_written_as_json(whole, copy, diff, tmp_path):
    alter(copy, "digests", set_at(2, "gradients", BROKEN))
    file = tmp_path / "found.json"
    assert diff(whole, copy, "--json", file)[0] == 1
    found = json.loads(file.read_text())
    assert found["first_step_that_differs"] == 2 and found["steps"] == [1, 2, 3]
    (quantity,) = [q for q in found["quantities"] if q["differing"]]
    assert quantity == {"name": "gradients", "parts": 13, "differing": [BROKEN]}
    assert found["recipe"] == found["fingerprint"] == {}


def drop(name):
    return lambda run: (run / name).unlink()


def write(name, text):
    return lambda run: (run / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no run directory"),
        (drop("metrics.jsonl"), "it has no metrics.jsonl"),
        (drop("config.yaml"), "it has no config.yaml"),
        (write("metrics.jsonl", ""), "metrics.jsonl is empty"),
        (write("metrics.jsonl", '{"step": 0, "eval/reward": 1}\n'), "no training step in common"),
        (write("digests.jsonl", '{"step": 1}\n{"st'), "digests.jsonl, line 2"),
        (write("config.yaml", "- 1"), "config.yaml is no recipe"),
        (write("config.yaml", "a: {"), "config.yaml is not valid YAML"),
        (write("checkpoints/step_000003/trainer.json", "{}"), "trainer.json does not hold"),
    ],
)
def test_what_is_no_whole_run_is_refused_in_one_line(whole, copy, diff, damage, message):
    damage(copy)
    for pair in ((whole, copy), (copy, whole)):
        status, said = diff(*pair)
        assert status == 2 and said.out == ""
        assert message in said.err and str(copy) in said.err and said.err.count("\n") == 1


def test_a_critic_is_compared_by_its_values_and_its_weights():
    made = _made({"consistency/critic_digest": "ab"}, {"values": "cd"}, several=False)
    assert made["values of the critic"] == {"": "cd"}
    assert made["weights of the critic"] == {"": "ab"}
    plain = _made({}, {}, several=False)
    assert not plain["values of the critic"] and not plain["weights of the critic"]
