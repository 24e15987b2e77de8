"""`rollout.sampling.stop` of a recipe: completions end with a string, which rewards read."""

import pytest
import yaml

from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.step_files import read_rows

STOP = {
    "rollout.sampling": {"n": 4, "max_tokens": 24, "stop": ["a", "e", "i"]},
    "rollout.num_kv_blocks": None,
    "training.steps": 1,
    "tracking.samples": 32,
}


def test_completions_end_with_a_stop_string_that_rewards_read(tiny_run):
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write(
            "def vowels(prompts, completions, answers, **_):\n"
            "    assert not any(set(text[:-1]) & set('aei') for text in completions)\n"
            "    return [float(text[-1:] in ('a', 'e', 'i')) for text in completions]\n"
        )
    term = {"reward.functions": [{"name": "toy_rewards:vowels"}]}
    summary, rows = tiny_run(**STOP | term)
    assert summary["consistency/mismatched_tokens"] == 0 < rows[0]["reward/mean"]
    directory = tiny_run.directory / "run"
    for row in read_rows(directory / "samples.jsonl"):
        for sample in row["samples"]:
            assert sample["reward"] == 0 or sample["finish_reason"] == "stop"
    kept = yaml.safe_load((directory / "config.yaml").read_text())["rollout"]["sampling"]
    assert kept["stop"] == ["a", "e", "i"]
    longer = STOP | term | {"training.steps": 2}
    with pytest.raises(CheckpointError, match=r"rollout\.sampling\.stop"):
        tiny_run(
            **longer | {"rollout.sampling": STOP["rollout.sampling"] | {"stop": ["a"]}}, resume=True
        )
    assert tiny_run(**longer, resume=True)[0]["consistency/mismatched_tokens"] == 0


def test_a_recipe_without_them_names_none(tiny_run):
    assert "stop" not in tiny_run.config().model_dump()["rollout"]["sampling"]
