import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.replay import load_replay_bundle
from rl_consistency.trainers import checkpoint
from rl_consistency.trainers import run as run_module
from rl_consistency.trainers.checkpoint import CheckpointError, list_checkpoints
from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.examples import DataError
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.grpo import GRPOTrainer
from rl_consistency.trainers.policy import PolicyError, build_model
from rl_consistency.trainers.rewards import RewardError
from rl_consistency.trainers.run_directory import RunDirectoryError
from rl_consistency.trainers.tracking import MetricsFile, read_metrics

ROOT = Path(__file__).parents[2]
LONG = {
    "training.steps": 6,
    "training.save_every": 2,
    "training.eval_every": 3,
    "warm_start.steps": 2,
    "warm_start.batch_size": 4,
    "algorithm.kl_coefficient": 0.05,
    "algorithm.updates_per_rollout": 2,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 3,
    "consistency.gradient_check_every": 3,
    "consistency.shadow_every": 2,
}
"""Something of everything that a resumed run has to continue."""


def files_of(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def lasting_summary(summary):
    return {k: v for k, v in summary.items() if k != "seconds" and not k.startswith("time/")}


def test_a_run_leaves_what_it_promises(tiny_run):
    told = []
    summary, rows = tiny_run(**LONG, announce=told.append)
    directory = tiny_run.directory / "run"
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "reference.safetensors",
        "summary.json",
    ]
    assert load_config(directory / "config.yaml") == tiny_run.config(**LONG)
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert ["eval/reward" in row for row in rows] == [True, False, False, True, False, False, True]
    kept = list_checkpoints(directory / "checkpoints")
    assert [path.name for path in kept] == ["step_000004", "step_000006"]
    final = AutoModelForCausalLM.from_pretrained(kept[-1])
    assert parameter_digest(final) == summary["parameter_digest"]
    assert summary["parameter_digest"] == rows[-1]["consistency/parameter_digest"]
    assert summary["consistency/tokens"] == sum(row["consistency/tokens"] for row in rows[1:])
    assert summary["consistency/mismatched_tokens"] == 0
    assert summary["consistency/gradient_check/checks"] == 2
    assert summary["consistency/gradient_check/passed"] == 2
    assert summary["stock/mismatched_tokens"] > 0
    assert summary["strict"] == {"strict": True, "stock_ops": []}
    for path in ("rollout", "training", "stock_rollout", "stock_training"):
        assert summary[f"time/{path}_tokens_per_second"] > 0
    assert told == [line for line in told if line.startswith("warm start")] != []


def test_a_run_repeated_takes_the_same_trajectory(tiny_run, lasting):
    first, rows = tiny_run(**LONG)
    again, rows_again = tiny_run(**LONG, overwrite=True)
    assert lasting_summary(first) == lasting_summary(again)
    assert lasting(rows) == lasting(rows_again)
    other, _ = tiny_run(**{**LONG, "run.seed": 9}, overwrite=True)
    assert other["parameter_digest"] != first["parameter_digest"]


def test_a_run_does_not_touch_global_state(tiny_run):
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    state = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    try:
        tiny_run(**{"training.steps": 1})
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_that_is_off_never_happens(tiny_run):
    summary, rows = tiny_run(**{"training.steps": 1})
    assert [row["step"] for row in rows] == [1]
    assert not any("eval/reward" in row for row in rows) and summary["eval/first"] is None


def test_a_missing_wandb_is_refused_before_anything_is_written(tiny_run, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"wandb is not installed: pip install"):
        tiny_run(**{"tracking.wandb": {"project": "bits"}})
    assert not (tiny_run.directory / "run").exists()


def test_wandb_gets_the_metrics_too(tiny_run, monkeypatch):
    seen = []

    class Wandb:
        def __init__(self, project, **given):
            self.project, self.given = project, given

        def log(self, step, metrics):
            seen.append((self.project, self.given["mode"], step, set(metrics)))

        def close(self):
            seen.append("closed")

    monkeypatch.setattr(run_module, "WandbTracker", Wandb)
    monkeypatch.setattr(run_module, "find_spec", lambda name: name)
    tiny_run(**{"training.steps": 1, "tracking.wandb": {"project": "bits"}})
    assert seen[0][:3] == ("bits", "offline", 1) and "consistency/tokens" in seen[0][3]
    assert seen[-1] == "closed"


# A directory that holds something already.


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tiny_run):
    tiny_run(**{"training.steps": 1})
    before = files_of(tiny_run.directory / "run")
    with pytest.raises(RunDirectoryError, match="already holds a run; .*--resume.*--overwrite"):
        tiny_run(**{"training.steps": 1})
    assert files_of(tiny_run.directory / "run") == before


def test_overwriting_removes_the_old_run_and_nothing_else(tiny_run):
    directory = tiny_run.directory / "run"
    tiny_run(**{"training.steps": 3, "training.save_every": 1})
    (directory / "notes.txt").write_text("mine")
    (directory / "replay").mkdir()
    summary, rows = tiny_run(**{"training.steps": 1}, overwrite=True)
    assert [row["step"] for row in rows] == [1] and summary["steps"] == 1
    assert [p.name for p in list_checkpoints(directory / "checkpoints")] == ["step_000001"]
    assert (directory / "notes.txt").read_text() == "mine"
    assert not (directory / "replay").exists()


def test_a_bad_start_does_not_cost_the_run_it_would_overwrite(tiny_run):
    tiny_run(**{"training.steps": 1})
    before = files_of(tiny_run.directory / "run")
    with pytest.raises(RewardError, match="unknown reward function"):
        tiny_run(**{"reward.functions": [{"name": "exakt_match"}]}, overwrite=True)
    assert files_of(tiny_run.directory / "run") == before


def test_a_policy_inside_the_run_it_would_overwrite_is_refused(tiny_run):
    tiny_run(**{"training.steps": 1})
    saved = tiny_run.directory / "run" / "checkpoints" / "step_000001"
    with pytest.raises(RunDirectoryError, match="lies inside"):
        tiny_run(**{"policy.build": None, "policy.path": str(saved)}, overwrite=True)
    assert saved.is_dir()


def test_a_file_in_the_place_of_the_directory_is_refused(tiny_run):
    (tiny_run.directory / "run").write_text("")
    with pytest.raises(RunDirectoryError, match="is not a directory"):
        tiny_run()


def test_the_last_checkpoint_starts_another_run(tiny_run):
    first, _ = tiny_run(**{"training.steps": 1})
    saved = tiny_run.directory / "run" / "checkpoints" / "step_000001"
    given = {"policy.build": None, "policy.path": str(saved), "tokenizer.kind": "auto"}
    _, rows = tiny_run.of_its_own("next", **given, **{"training.steps": 1})
    assert rows[0]["consistency/mismatched_tokens"] == 0
    assert rows[0]["consistency/parameter_digest"] != first["parameter_digest"]


# Resuming.


@pytest.fixture(scope="module")
def whole_run():
    """Summary and metrics of the run that others are interrupted in."""
    return {}


def uninterrupted(whole_run, tiny_run, lasting):
    if not whole_run:
        summary, rows = tiny_run.of_its_own("whole", **LONG)
        whole_run |= {"summary": lasting_summary(summary), "rows": lasting(rows)}
    return whole_run["summary"], whole_run["rows"]


class Interrupt(BaseException):
    """Stops a run where it is, as a signal would."""


def interrupt(monkeypatch, place):
    """Make the next run stop at `place`, once."""
    where, step = place
    armed = [True]

    def stop_if(here):
        if here and armed:
            armed.clear()
            raise Interrupt

    log, save = MetricsFile.log, run_module.save_checkpoint
    learn, write = GRPOTrainer._learn, checkpoint.save_file
    seen = {"rollouts": 0, "saving": None}

    def logging(self, at, metrics):
        stop_if(where == "before log" and at == step)
        log(self, at, metrics)
        stop_if(where == "after log" and at == step)

    def saving(directory, *, step: int, **given):
        seen["saving"] = step
        path = save(directory, step=step, **given)
        stop_if(where == "after save" and step == place[1])
        return path

    def writing(tensors, path, **given):
        write(tensors, path, **given)
        if where == "in save" and seen["saving"] == step:
            path.write_bytes(path.read_bytes()[:100])
            stop_if(True)

    def learning(self, experience):
        seen["rollouts"] += 1
        metrics = learn(self, experience)
        stop_if(where == "after learning" and seen["rollouts"] == step)
        return metrics

    monkeypatch.setattr(MetricsFile, "log", logging)
    monkeypatch.setattr(run_module, "save_checkpoint", saving)
    monkeypatch.setattr(checkpoint, "save_file", writing)
    monkeypatch.setattr(GRPOTrainer, "_learn", learning)


@pytest.mark.parametrize(
    "place",
    [
        ("after log", 0),
        ("after save", 0),
        ("after log", 2),
        ("in save", 2),
        ("after save", 2),
        ("after learning", 3),
        ("before log", 4),
        ("after log", 5),
        ("after log", 6),
        ("after save", 6),
    ],
    ids=lambda place: " ".join(map(str, place)),
)
def test_a_run_stopped_anywhere_and_resumed_ends_as_if_never_stopped(
    tiny_run, lasting, monkeypatch, whole_run, place
):
    summary, rows = uninterrupted(whole_run, tiny_run, lasting)
    with monkeypatch.context() as patched:
        interrupt(patched, place)
        with pytest.raises(Interrupt):
            tiny_run(**LONG)
    if place == ("after log", 0):  # nothing has been saved yet
        with pytest.raises(RunDirectoryError, match="no complete checkpoint to resume from"):
            tiny_run(**LONG, resume=True)
        return
    told = []
    resumed, resumed_rows = tiny_run(**LONG, resume=True, announce=told.append)
    assert "resumed from" in told[0] and not any("warm start" in line for line in told)
    assert lasting(resumed_rows) == rows
    assert lasting_summary(resumed) == summary


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_a_low_precision_run_resumes_too(tiny_run, lasting, monkeypatch, dtype):
    changes = {
        "policy.dtype": dtype,
        "training.steps": 4,
        "training.save_every": 2,
        "optimizer.learning_rate": 1e-3,
    }
    summary, rows = tiny_run.of_its_own("whole", **changes)
    with monkeypatch.context() as patched:
        interrupt(patched, ("after log", 3))
        with pytest.raises(Interrupt):
            tiny_run(**changes)
    resumed, resumed_rows = tiny_run(**changes, resume=True)
    assert lasting(resumed_rows) == lasting(rows)
    assert lasting_summary(resumed) == lasting_summary(summary)


def test_a_finished_run_resumes_to_the_same_summary(tiny_run, lasting):
    summary, rows = tiny_run(**LONG)
    again, rows_again = tiny_run(**LONG, resume=True)
    assert lasting_summary(again) == lasting_summary(summary) and rows_again == rows


def test_resuming_with_another_config_is_refused(tiny_run):
    tiny_run(**{"training.save_every": 1})
    before = files_of(tiny_run.directory / "run")
    with pytest.raises(RunDirectoryError, match="is not the configuration given now"):
        tiny_run(**{"training.save_every": 1, "optimizer.learning_rate": 1e-5}, resume=True)
    assert files_of(tiny_run.directory / "run") == before


def test_resuming_where_there_is_no_run_is_refused(tiny_run):
    with pytest.raises(RunDirectoryError, match="holds no run to resume"):
        tiny_run(resume=True)


def test_resuming_without_a_checkpoint_is_refused(tiny_run, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt(patched, ("after log", 2))
        with pytest.raises(Interrupt):
            tiny_run()
    before = files_of(tiny_run.directory / "run")
    with pytest.raises(RunDirectoryError, match=r"no complete checkpoint.*training\.save_every"):
        tiny_run(resume=True)
    assert files_of(tiny_run.directory / "run") == before


def test_resuming_in_another_environment_is_refused_by_name(tiny_run):
    tiny_run(**{"training.save_every": 1})
    before = files_of(tiny_run.directory / "run")
    with (
        strict(except_={"attention"}),
        pytest.raises(CheckpointError, match="stock_ops: attention != none"),
    ):
        tiny_run(**{"training.save_every": 1}, resume=True)
    assert files_of(tiny_run.directory / "run") == before


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_resuming_from_a_truncated_checkpoint_is_refused_and_loses_nothing(tiny_run, lasting, file):
    changes = {"training.save_every": 1}
    _, rows = tiny_run(**changes)
    newest = list_checkpoints(tiny_run.directory / "run" / "checkpoints")[-1]
    (newest / file).write_bytes((newest / file).read_bytes()[:-50])
    before = files_of(tiny_run.directory / "run")
    with pytest.raises(CheckpointError, match=str(newest)):
        tiny_run(**changes, resume=True)
    assert files_of(tiny_run.directory / "run") == before
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


@pytest.mark.parametrize("damage", ["missing", "truncated", "another"])
def test_resuming_with_another_kl_reference_is_refused(tiny_run, damage):
    changes = {"training.save_every": 1, "algorithm.kl_coefficient": 0.1}
    tiny_run(**changes)
    file = tiny_run.directory / "run" / "reference.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-50])
    else:
        newest = list_checkpoints(tiny_run.directory / "run" / "checkpoints")[-1]
        checkpoint.save_file(load_file(newest / "model.safetensors"), file)
    with pytest.raises(CheckpointError, match=r"reference\.safetensors is (missing|not the KL)"):
        tiny_run(**changes, resume=True)


SCRIPT = """
import os, signal, sys
from rl_consistency.trainers import checkpoint, run
from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.tracking import MetricsFile

recipe, mode = sys.argv[1:]
log, save_file = MetricsFile.log, checkpoint.save_file

def log_and_die(self, step, metrics):
    log(self, step, metrics)
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

def save_half_and_die(tensors, path, **given):
    save_file(tensors, path, **given)
    if "step_000004" in str(path) and path.name == "optimizer.safetensors":
        os.truncate(path, 1000)
        os.kill(os.getpid(), signal.SIGKILL)

if mode == "in a step":
    MetricsFile.log = log_and_die
else:
    checkpoint.save_file = save_half_and_die
run.train(load_config(recipe))
"""


@pytest.mark.parametrize(("mode", "newest"), [("in a step", 4), ("in a save", 2)])
def test_a_killed_process_is_resumed_by_another_as_if_never_killed(
    tiny_run, lasting, whole_run, mode, newest
):
    summary, rows = uninterrupted(whole_run, tiny_run, lasting)
    recipe, script = tiny_run.directory / "recipe.yaml", tiny_run.directory / "script.py"
    recipe.write_text(yaml.safe_dump(tiny_run.tree(**LONG)))
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), str(tiny_run.directory)])
    killed = subprocess.run(
        [sys.executable, script, recipe, mode],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    directory = tiny_run.directory / "run"
    assert list_checkpoints(directory / "checkpoints")[-1].name == f"step_{newest:06d}"
    assert not (directory / "summary.json").exists()
    assert len(read_metrics(directory / "metrics.jsonl")) > newest
    resumed, resumed_rows = tiny_run(**LONG, resume=True)
    assert lasting(resumed_rows) == rows
    assert lasting_summary(resumed) == summary


def test_an_interrupt_from_the_keyboard_leaves_a_run_that_resumes(
    tiny_run, lasting, whole_run, monkeypatch
):
    summary, rows = uninterrupted(whole_run, tiny_run, lasting)
    real = MetricsFile.log

    def log(self, step, metrics):
        real(self, step, metrics)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    # A process started in the background ignores the signal, and Python then leaves it at that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(MetricsFile, "log", log)
            tiny_run(**LONG)
    finally:
        signal.signal(signal.SIGINT, before)
    resumed, resumed_rows = tiny_run(**LONG, resume=True)
    assert lasting(resumed_rows) == rows and lasting_summary(resumed) == summary


def test_a_disk_that_fills_up_in_mid_run_costs_nothing_that_was_saved(
    tiny_run, lasting, whole_run, monkeypatch
):
    summary, rows = uninterrupted(whole_run, tiny_run, lasting)
    real = checkpoint.save_file

    def full(tensors, path, **given):
        if "step_000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, **given)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space left"):
        patched.setattr(checkpoint, "save_file", full)
        tiny_run(**LONG)
    resumed, resumed_rows = tiny_run(**LONG, resume=True)
    assert lasting(resumed_rows) == rows and lasting_summary(resumed) == summary


# Bad input.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", r"raised RuntimeError: no judge at home \(sample 0, example \d+"),
        ("nan_for_the_third", r"returned nan, not a finite number, for sample 2, example \d+"),
        ("one_too_few", r"returned 7 scores for 8 completions: sample 7"),
    ],
)
def test_a_failing_reward_function_is_told_with_its_sample(tiny_run, name, message):
    with pytest.raises(RewardError, match=message):
        tiny_run(**{"reward.functions": [{"name": f"toy_rewards:{name}"}]})


def test_a_failing_reward_function_does_not_cost_the_checkpoints(tiny_run, lasting, monkeypatch):
    import toy_rewards

    changes = {"training.steps": 4, "training.save_every": 2}
    _, rows = tiny_run.of_its_own("whole", **changes)
    real, calls = toy_rewards.varied, []

    def fails_later(**given):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("gone")
        return real(**given)

    with monkeypatch.context() as patched:
        patched.setattr(toy_rewards, "varied", fails_later)
        with pytest.raises(RewardError, match="gone"):
            tiny_run(**changes)
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


def from_file(tiny_run, **changes):
    return {"data.task": None, "data.path": str(tiny_run.example_file())} | changes


def saved_policy(directory, positions=64):
    build = BuildSection(
        architecture="qwen3",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=positions,
    )
    build_model(build, byte_tokenizer(), seed=2).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return {"policy.build": None, "policy.path": str(directory), "tokenizer.kind": "auto"}


def test_a_model_directory_and_a_file_of_examples_run_as_well(tiny_run):
    summary, rows = tiny_run(
        **saved_policy(tiny_run.directory / "model"),
        **from_file(
            tiny_run,
            **{
                "data.eval_path": str(tiny_run.example_file(5, "eval.jsonl")),
                "training.eval_every": 1,
            },
        ),
    )
    assert summary["consistency/mismatched_tokens"] == 0 and summary["eval/last"] is not None
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data.path": "absent.jsonl"}, DataError, "cannot read the data file absent.jsonl"),
        ({"data.max_prompt_tokens": 3}, DataError, r"example \d+: its prompt has 4 tokens"),
        ({"data.prompt_template": "{prompt}" * 8}, DataError, r"example \d+: its prompt has"),
        ({"rollout.prompts_per_step": 21}, DataError, "21 exceeds the 20 training examples of"),
    ],
)
def test_data_that_cannot_be_used_is_named_before_the_directory_is_made(
    tiny_run, changes, error, message
):
    given = from_file(tiny_run, **changes) | {"rollout.max_new_tokens": 9}
    with pytest.raises(error, match=message):
        tiny_run(**given)
    assert not (tiny_run.directory / "run").exists()


def test_a_prompt_longer_than_the_context_is_named(tiny_run):
    policy = saved_policy(tiny_run.directory / "model", positions=12)
    with pytest.raises(DataError, match=r"example \d+: .* the model's context is 12"):
        tiny_run(**policy, **from_file(tiny_run))
    assert not (tiny_run.directory / "run").exists()


def test_an_answer_too_long_for_the_warm_start_is_named(tiny_run):
    changes = from_file(tiny_run, **{"warm_start.steps": 1})
    Path(changes["data.path"]).write_text(
        json.dumps({"question": "1+1=", "answer": "2"})
        + "\n"
        + json.dumps({"question": "2+2=", "answer": "4" * 61})
        + "\n"
    )
    changes |= {"rollout.prompts_per_step": 1}
    with pytest.raises(DataError, match=r"example 1: prompt and answer have 66 tokens, .* 64"):
        tiny_run(**changes)


def test_a_missing_model_directory_leaves_nothing_in_the_way_of_the_next_try(tiny_run):
    with pytest.raises(PolicyError, match="no model directory"):
        tiny_run(**{"policy.build": None, "policy.path": "absent", "tokenizer.kind": "auto"})
    tiny_run(**{"training.steps": 1})


def test_active_dropout_is_refused(tiny_run):
    policy = saved_policy(tiny_run.directory / "model")
    file = tiny_run.directory / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.1}))
    with pytest.raises(ValueError, match="dropout"):
        tiny_run(**policy)
    assert not (tiny_run.directory / "run").exists()


def test_weights_that_diverge_stop_the_run_with_the_remedy(tiny_run):
    with pytest.raises((ValueError, ConsistencyError), match="not finite|gradient norm is"):
        tiny_run(**{"optimizer.learning_rate": 1e30, "optimizer.max_grad_norm": None})


# Without the promise.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_not_strict_reports_its_drift(tiny_run, dtype):
    summary, rows = tiny_run(
        **{
            "policy.dtype": dtype,
            "consistency.strict": False,
            "consistency.on_drift": "record",
            "consistency.gradient_check_every": 1,
            "optimizer.learning_rate": 1e-3,
        }
    )
    assert summary["consistency/mismatched_tokens"] > 0
    assert summary["consistency/logprob_abs_diff/max"] > 0
    assert summary["consistency/gradient_check/mismatched_elements"] > 0
    assert summary["strict"]["strict"] is False and len(rows) == 3
    bundles = list((tiny_run.directory / "run" / "replay").iterdir())
    assert bundles and load_replay_bundle(bundles[0]).drift().mismatched_tokens > 0


def test_a_run_that_is_not_strict_raises_by_default_with_its_bundle_saved(tiny_run):
    with pytest.raises(ConsistencyError, match="step 1: .*Replay bundle"):
        tiny_run(**{"consistency.strict": False})
    assert len(list((tiny_run.directory / "run" / "replay").iterdir())) == 1


def test_one_op_alone_can_be_left_out(tiny_run):
    told = []
    summary, _ = tiny_run(
        **{"consistency.strict_except": ["attention"], "consistency.on_drift": "warn"},
        announce=told.append,
    )
    assert summary["consistency/mismatched_tokens"] > 0 and "other logprobs" in told[0]
    assert summary["strict"]["stock_ops"] == ["attention"]
    assert summary["fingerprint"]["stock_ops"] == "attention"


def test_the_models_of_a_run_are_given_back_unpatched(tiny_run, monkeypatch):
    models = []
    real = run_module.patch

    def remembered(model):
        models.append(model)
        return real(model)

    monkeypatch.setattr(run_module, "patch", remembered)
    tiny_run(**{"training.steps": 1, "algorithm.kl_coefficient": 0.1})
    assert len(models) == 2
    for model in models:
        with patch(model) as session:
            session.verify()
