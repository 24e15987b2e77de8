import argparse
import json

import pytest
import yaml

from rl_consistency.cli import train
from rl_consistency.trainers.run_directory.directory import RunDirectoryError

RECIPE = {
    "run": {"name": "tiny", "num_threads": 1},
    "policy": {
        "build": {
            "architecture": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    },
    "tokenizer": {"kind": "byte"},
    "data": {
        "task": {"name": "arithmetic", "num_terms": 3, "train_size": 16, "eval_size": 2},
        "max_prompt_tokens": 6,
    },
    "reward": {"functions": [{"name": "arithmetic"}]},
    "rollout": {"prompts_per_step": 4, "sampling": {"n": 2, "max_tokens": 8}},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 2, "eval_every": 2},
    "consistency": {"gradient_check_every": 2, "shadow_every": 1},
}


@pytest.fixture
def command(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))

    def run(*arguments):
        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        target = f"run.output_dir={tmp_path / 'run'}"
        return train.run(parser.parse_args([str(recipe), "--set", target, *arguments]))

    return run


def test_a_run_without_drift_succeeds_and_shows_both_sides(command, tmp_path, capsys):
    assert command() == 0
    directory = tmp_path / "run"
    shown = capsys.readouterr().out
    summary = json.loads((directory / "summary.json").read_text())
    assert (directory / "drift.png").is_file() and (directory / "report.html").is_file()
    for text in (
        "tiny: 2 steps",
        "stock Hugging Face",
        f"{summary['consistency/tokens']:,}",
        "gradient checks passed",
        "1 of 1",
        "first-update ratio",
        "drift.png",
        "report.html",
    ):
        assert text in shown, text
    assert summary["stock/mismatched_tokens"] > 0


def test_a_run_with_recorded_drift_fails(command):
    settings = ("consistency.strict=false", "consistency.on_drift=record")
    assert command(*(part for s in settings for part in ("--set", s))) == 1


def test_a_run_without_shadow_checks_or_evaluation_is_shown_too(command, capsys):
    off = ("consistency.shadow_every=0", "consistency.gradient_check_every=0")
    settings = (*off, "training.eval_every=0")
    assert command(*(part for s in settings for part in ("--set", s))) == 0
    assert "evaluation" not in capsys.readouterr().out


def test_a_run_is_resumed_or_replaced_only_when_told(command):
    assert command() == 0
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        command()
    assert command("--resume") == 0
    assert command("--overwrite") == 0


def test_resuming_and_replacing_at_once_is_refused(command):
    with pytest.raises(SystemExit):
        command("--resume", "--overwrite")
