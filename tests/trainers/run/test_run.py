import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.replay import load_replay_bundle
from rl_consistency.rollout.weights import model_digest
from rl_consistency.trainers import run as run_module
from rl_consistency.trainers import tracking
from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.rewards import RewardError
from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints


def test_a_run_leaves_what_it_promises(tiny_run):
    told = []
    summary, rows = tiny_run(**tiny_run.LONG, announce=told.append)
    directory = tiny_run.directory / "run"
    assert sorted(path.name for path in directory.iterdir()) == [
        ".rl_consistency.lock",
        "checkpoints",
        "config.yaml",
        "digests.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "reference.safetensors",
        "samples.jsonl",
        "summary.json",
    ]
    resolved = tiny_run.LONG | {"training.strategy": "replicated"}
    assert load_config(directory / "config.yaml") == tiny_run.config(**resolved)
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert ["eval/reward" in row for row in rows] == [True, False, False, True, False, False, True]
    kept = list_checkpoints(directory / "checkpoints")
    assert [path.name for path in kept] == ["step_000004", "step_000006"]
    final = AutoModelForCausalLM.from_pretrained(kept[-1])
    assert parameter_digest(final) == summary["parameter_digest"]
    assert model_digest(final) == rows[-1]["rollout/weights_digest"]
    assert summary["consistency/tokens"] == sum(row["consistency/tokens"] for row in rows[1:])
    assert summary["consistency/mismatched_tokens"] == 0
    assert summary["consistency/gradient_check/checks"] == 2
    assert summary["consistency/gradient_check/passed"] == 2
    assert summary["stock/mismatched_tokens"] > 0
    assert summary["strict"] == {"strict": True, "stock_ops": []}
    for path in ("rollout", "training", "stock_rollout", "stock_training"):
        assert summary[f"time/{path}_tokens_per_second"] > 0
    assert told == [line for line in told if line.startswith("warm start")] != []


@pytest.mark.thorough
def test_a_run_repeated_takes_the_same_trajectory(tiny_run, lasting, lasting_summary):
    first, rows = tiny_run(**tiny_run.LONG)
    again, rows_again = tiny_run(**tiny_run.LONG, overwrite=True)
    assert lasting_summary(first) == lasting_summary(again)
    assert lasting(rows) == lasting(rows_again)
    other, _ = tiny_run(**{**tiny_run.LONG, "run.seed": 9}, overwrite=True)
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


def test_wandb_gets_the_metrics_and_whether_the_run_failed(tiny_run, monkeypatch):
    seen = []

    class Wandb:
        def __init__(self, project, **given):
            self.project, self.given = project, given

        def log(self, step, metrics):
            seen.append((self.project, self.given["mode"], step, set(metrics)))

        def close(self, *, failed):
            seen.append(failed)

    monkeypatch.setattr(tracking, "WandbTracker", Wandb)
    monkeypatch.setattr(run_module, "check_wandb", lambda section, warn: section)
    changes = {"training.steps": 1, "tracking.wandb": {"project": "bits"}}
    tiny_run(**changes)
    assert seen[0][:3] == ("bits", "offline", 1) and "consistency/tokens" in seen[0][3]
    assert seen[-1] is False
    with pytest.raises(RewardError, match="raised SystemExit: 0"):
        tiny_run(
            **changes, **{"reward.functions": [{"name": "toy_rewards:exiting"}]}, overwrite=True
        )
    assert seen[-1] is True


@pytest.fixture
def moving(tiny_run, monkeypatch):
    """A reward that changes the directory; where a run with it begins, and where that leads."""
    there, start = tiny_run.directory / "there", tiny_run.directory / "start"
    for directory in (there, start):
        directory.mkdir()
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write(
            "def moving(completions, **_):\n"
            f"    import os\n    os.chdir({str(there)!r})\n    return [0.0] * len(completions)\n"
        )
    monkeypatch.chdir(start)
    return {"reward.functions": [{"name": "toy_rewards:moving"}]}, start, there


@pytest.mark.parametrize("given", ["here", None])
def test_a_reward_function_that_changes_the_directory_moves_no_file(tiny_run, moving, given):
    reward, start, there = moving
    tiny_run(**reward, **{"training.save_every": 1, "run.output_dir": given})
    assert (start / (given or "runs/tiny") / "summary.json").is_file()
    assert not list(there.iterdir())


def test_a_relative_path_leads_elsewhere_once_a_reward_changed_the_directory(tiny_run, moving):
    """Negative control."""
    reward, start, _ = moving
    config = tiny_run.config(**reward, **{"training.steps": 1})
    section = config.run.model_copy(update={"output_dir": Path("here")})
    with pytest.raises(FileNotFoundError, match=r"here/metrics\.jsonl"):
        run_module.train(config.model_copy(update={"run": section}))
    assert (start / "here" / "metrics.jsonl").is_file()


def test_the_last_checkpoint_starts_another_run(tiny_run):
    first, _ = tiny_run(**{"training.steps": 1})
    saved = tiny_run.directory / "run" / "checkpoints" / "step_000001"
    given = {"policy.build": None, "policy.path": str(saved), "tokenizer.kind": "auto"}
    second, rows = tiny_run.of_its_own("next", **given, **{"training.steps": 1})
    assert rows[0]["consistency/mismatched_tokens"] == 0
    assert second["parameter_digest"] != first["parameter_digest"]


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


def test_the_models_of_a_run_are_given_back_unpatched(tiny_run, monkeypatch):
    models = []
    real = run_module.patch

    def remembered(model, **options):
        models.append(model)
        return real(model, **options)

    monkeypatch.setattr(run_module, "patch", remembered)
    tiny_run(**{"training.steps": 1, "algorithm.kl_coefficient": 0.1})
    assert len(models) == 2
    for model in models:
        with patch(model) as session:
            session.verify()
