"""Completions of a step with their rewards, and a warning where rewards tell nothing."""

import json
from math import isnan, nan

import pytest
import torch

from rl_consistency.cli.report import render
from rl_consistency.rollout.completion import Completion
from rl_consistency.trainers.algorithms.experience import samples_of
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.rewards import RewardError, Rewards
from rl_consistency.trainers.run import NoSignal
from rl_consistency.trainers.run_directory.step_files import read_rows


def shown(rewards, *, n, count):
    """Indices of the samples that are shown of completions with these rewards."""
    examples = [Example(id=i, prompt="p", answer="a", target="a") for i in range(len(rewards))]
    completions = [
        Completion(i // n, i % n, [i], torch.zeros(1), "stop") for i in range(len(rewards))
    ]
    given = Rewards(rewards, {"mine": rewards})

    def texts(chosen):
        return [str(completion.token_ids[0]) for completion in chosen]

    rows = samples_of(examples, completions, given, texts, n=n, count=count)
    kept = [None if isnan(reward) else reward for reward in rewards]
    assert [row["reward"] for row in rows] == [kept[int(row["completion"])] for row in rows]
    return [int(row["completion"]) for row in rows]


@pytest.mark.parametrize(
    ("n", "count", "expected"),
    [(3, 2, [1, 0]), (3, 3, [1, 0, 3]), (3, 9, [1, 0, 3, 5]), (1, 2, [0, 1]), (3, 0, [])],
)
def test_the_best_and_the_worst_of_each_group_are_shown(n, count, expected):
    assert shown([0.0, 2.0, 1.0, 5.0, 5.0, 5.0], n=n, count=count) == expected


def test_a_completion_without_a_reward_is_the_worst():
    assert shown([nan, 2.0, 1.0, nan, nan, 5.0], n=3, count=9) == [1, 0, 5, 4]


def test_a_run_goes_on_where_no_reward_function_applies(tiny_run):
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write("async def unsure(completions, **_):\n    return [None] * len(completions)\n")
    term = {"name": "toy_rewards:unsure", "signature": "trl"}
    with pytest.warns(UserWarning, match="all reward functions returned None"):
        summary, _ = tiny_run(**{"reward.functions": [term], "training.steps": 1})
    assert summary["reward/first"] is None and summary["consistency/mismatched_tokens"] == 0
    (row,) = read_rows(tiny_run.directory / "run" / "samples.jsonl")
    assert row["samples"][0]["reward"] is None
    ppo = {"algorithm.name": "ppo", "run.output_dir": str(tiny_run.directory / "ppo")}
    with pytest.warns(UserWarning), pytest.raises(RewardError, match="ppo needs the reward of e"):
        tiny_run(**{"reward.functions": [term], "training.steps": 1} | ppo)


def test_a_run_keeps_its_samples_and_shows_them(tiny_run):
    tiny_run(**{"tracking.samples": 3})
    directory = tiny_run.directory / "run"
    rows = read_rows(directory / "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        best, worst, _ = row["samples"]
        assert best["prompt"] == worst["prompt"] and best["reward"] >= worst["reward"]
        for sample in row["samples"]:
            score = sum(map(ord, sample["completion"])) % 7 / 7
            assert sample["reward"] == sample["rewards"]["toy_rewards:varied"] == score
    page = render(directory).read_text("utf-8")
    assert "<h2>Samples</h2>" in page and page.count("<td><code>length</code></td>") > 3


def test_what_a_completion_says_is_no_html_of_the_report(tiny_run):
    tiny_run(**{"training.steps": 1})
    file = tiny_run.directory / "run" / "samples.jsonl"
    row = json.loads(file.read_text())
    row["samples"][0]["completion"] = "<script>alert(1)</script>"
    file.write_text(json.dumps(row) + "\n")
    page = render(tiny_run.directory / "run").read_text("utf-8")
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize("line", ['{"step": 1}', '{"step": 1, "samples": [{"reward": 1}]}'])
def test_damaged_samples_are_named_by_file_and_line(tiny_run, line):
    tiny_run(**{"training.steps": 1})
    file = tiny_run.directory / "run" / "samples.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match="samples.jsonl, line 1: .*list of completions"):
        render(tiny_run.directory / "run")


def test_groups_of_equal_rewards_are_counted_and_warned_of_once(tiny_run):
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write("def ones(completions, **_): return [1.0] * len(completions)\n")
    told = []
    reward = {"reward.functions": [{"name": "toy_rewards:ones"}]}
    _, rows = tiny_run(**reward, announce=told.append)
    assert [row["reward/equal_group_fraction"] for row in rows] == [1.0] * 3
    warnings = [line for line in told if "all advantages are 0" in line]
    assert len(warnings) == 1 and warnings[0].startswith("step 1: ")


def test_the_warning_comes_again_after_a_step_with_a_signal():
    told = []
    look = NoSignal(told.append).look
    for step, share in enumerate((1.0, 1.0, 0.75, 1.0), start=1):
        look(step, {"reward/equal_group_fraction": share})
    look(5, {})
    for step, skipped in enumerate((1, 2, 0, 1), start=6):
        look(step, {"reward/equal_group_fraction": 0.5, "policy/skipped_updates": skipped})
    steps = [line.partition(":")[0] for line in told]
    assert steps == ["step 1", "step 4", "step 6", "step 9"] and "cut" in told[-1]


def test_the_share_of_groups_with_equal_rewards_is_exact(tiny_run):
    """Against the rewards of all samples."""
    _, rows = tiny_run(**{"tracking.samples": 8})
    samples = read_rows(tiny_run.directory / "run" / "samples.jsonl")
    for row, shown_row in zip(rows, samples, strict=True):
        rewards = [sample["reward"] for sample in shown_row["samples"]]
        pairs = list(zip(rewards[::2], rewards[1::2], strict=True))
        share = sum(a == b for a, b in pairs) / len(pairs)
        assert row["reward/equal_group_fraction"] == share
