"""The study's arms differ in what gives logprobs and in nothing else; its figures say what came."""

import json
from dataclasses import replace

import pytest
import torch
import yaml

from benchmarks.study import arms, document, runs
from benchmarks.study.arms import ARMS
from benchmarks.study.document import SERIES, figures, groups, table
from benchmarks.study.stock import sample, score
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset

RECIPE = {
    "run": {"name": "tiny", "num_threads": 1},
    "policy": {
        "build": {
            "architecture": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"kind": "byte"},
    "data": {
        "task": {"name": "arithmetic", "num_terms": 2, "train_size": 32, "eval_size": 4},
        "max_prompt_tokens": 32,
    },
    "reward": {"functions": [{"name": "benchmarks.recipe:variety", "signature": "trl"}]},
    "rollout": {"prompts_per_step": 4, "sampling": {"n": 2, "max_tokens": 6}},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 2},
}


@pytest.fixture
def study(tmp_path):
    """Runs arms of a tiny policy; gives the rows of each run's metrics, by arm."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))

    def run(*given, steps=2, setting="unsafe", **changes):
        sets = [f"--set={key}={value}" for key, value in changes.items()]
        common = ["--recipe", str(tmp_path / "tiny.yaml"), "--seeds", "3", "--steps", str(steps)]
        prompts = "--set=rollout.prompts_per_step=4"
        folder = tmp_path / "runs"
        given = ["--settings", setting, "--arms", *given]
        assert runs.main([str(folder), *given, *common, prompts, *sets]) == 0
        files = {file.parent.name.split("_")[1]: file for file in folder.glob("*/metrics.jsonl")}
        return {arm: list(map(json.loads, file.open())) for arm, file in files.items()}

    return run


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_stock_sampling_and_scoring_give_the_logprobs_of_the_model(name):
    model = build_preset(name)
    prompts, sampling = [[5, 6, 7, 8], [9, 4]], SamplingParams(n=3, max_tokens=7)
    found = sample(model, prompts, sampling, eos_token_ids=range(0, 40), seed=1)
    again = sample(model, prompts, sampling, eos_token_ids=range(0, 40), seed=1)
    assert [c.token_ids for c in found] == [c.token_ids for c in again]
    assert [(c.prompt_index, c.sample_index) for c in found] == [
        (p, s) for p in (0, 1) for s in (0, 1, 2)
    ]
    for c in found:
        stops = [token < 40 for token in c.token_ids]
        assert not any(stops[:-1]) and len(stops) <= 7
        assert c.finish_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(stops) == 7
    whole = [prompts[c.prompt_index] + c.token_ids for c in found]
    lengths = [len(prompts[c.prompt_index]) for c in found]
    scored = score(model, whole, lengths, 1.0)
    drawn = torch.cat([c.token_logprobs for c in found])
    with patch(model):
        ours = token_logprobs(model, whole, prompt_lengths=lengths)
    assert scored.lengths == ours.lengths
    for other in (drawn, ours.logprobs):
        torch.testing.assert_close(scored.logprobs, other, rtol=0, atol=2e-4)
    torch.testing.assert_close(scored.entropy, ours.entropy, rtol=0, atol=2e-4)


def test_greedy_samples_are_the_most_likely_tokens_and_truncation_is_refused():
    model = build_preset("tiny-llama")
    (greedy,) = sample(
        model, [[5, 6]], SamplingParams(temperature=0, max_tokens=1), eos_token_ids=[], seed=0
    )
    assert greedy.token_ids == [int(model(torch.tensor([[5, 6]])).logits[0, -1].argmax())]
    with pytest.raises(ValueError, match="whole vocabulary"):
        sample(model, [[5]], SamplingParams(top_p=0.5), eos_token_ids=[], seed=0)


def test_each_arm_trains_and_what_has_ended_is_not_run_again(study, monkeypatch):
    found = study(*ARMS, **{"training.eval_every": 2})
    for arm, rows in found.items():
        steps = [row for row in rows if row["step"]]
        assert len(steps) == 2 and all(row["gradient_norm"] > 0 for row in steps)
        differing = sum(row["consistency/mismatched_tokens"] for row in steps)
        assert (differing == 0) == (arm == "exact")
        assert max(row["consistency/logprob_abs_diff/max"] for row in steps) < 1e-4
        assert ("study/weight/mean" in steps[0]) == (arm == "truncated")
        assert steps[0]["policy/clip_fraction"] == 0 and steps[1]["eval/reward"] > 0
    assert len({row["rollout/weights_digest"] for rows in found.values() for row in rows[1:]}) == 6

    def trained_again(*given, **more):
        raise AssertionError("a run that has ended was run again")

    monkeypatch.setattr(runs.run, "train", trained_again)
    study(*ARMS)


def test_a_token_that_training_finds_more_likely_has_at_most_twice_its_gradient(study, monkeypatch):
    def less_likely(*given, **more):
        return [
            replace(completion, token_logprobs=completion.token_logprobs - 1.0)
            for completion in sample(*given, **more)
        ]

    monkeypatch.setattr(arms, "sample", less_likely)
    one = {"training.save_every": "null", "algorithm.updates_per_rollout": 1}
    found = study("stock", "truncated", steps=1, **one)
    stock, truncated = (found[arm][-1] for arm in ("stock", "truncated"))
    assert truncated["study/weight/truncated"] == 1 and truncated["study/weight/mean"] == 2
    assert truncated["gradient_norm"] == pytest.approx(2 * stock["gradient_norm"], rel=1e-6)
    assert stock["policy/ratio/max"] == pytest.approx(1, abs=1e-5)


def test_a_run_that_cannot_go_on_says_why(study, monkeypatch, tmp_path):
    def broken(*given, **more):
        found = score(*given, **more)
        return replace(found, logprobs=found.logprobs * float("nan"))

    monkeypatch.setattr(arms, "score", broken)
    study("stock", steps=1)
    text = (tmp_path / "runs/unsafe_stock_3" / runs.FAILED).read_text()
    assert text.startswith("GradientNormError: the gradient norm is nan")


def series(rewards):
    others = {name: [None, *[0.25] * (len(rewards) - 1)] for name in SERIES}
    return {**others, "reward": rewards}


def of(setting, arm, seed, rewards, failure=None):
    told = {"setting": setting, "arm": arm, "seed": seed, "failure": failure}
    return {**told, "series": series(rewards)}


def test_a_run_that_loses_half_of_its_best_reward_has_collapsed():
    lost, kept = [None, *[0.8] * 30, *[0.3] * 30], [None, *[0.8] * 30, *[0.5] * 30]
    for rewards, failure, collapsed in ((lost, None, 1), (kept, None, 0), (kept, "nan", 1)):
        found = figures(of("safe", "stock", 1, rewards, failure), 60)
        assert found["collapsed"] == collapsed and found["reward"] == rewards[-1]
    assert figures(of("safe", "stock", 1, lost), 30)["collapsed"] == 0


def test_only_seeds_that_every_arm_has_are_compared():
    long, short = [None, *[0.5] * 40], [None, *[0.5] * 10]
    found = [of("safe", arm, seed, long) for arm in ARMS for seed in (1, 2)]
    found += [of("safe", arm, 3, short if arm == "exact" else long) for arm in ARMS]
    found += [of("unsafe", "exact", 1, long)]
    compared = groups(found, 40)
    assert list(compared) == ["safe"]
    assert compared["safe"].steps == 40
    for each in compared["safe"].arms.values():
        assert [run["seed"] for run in each] == [1, 2]
    ended = [of("safe", "stock", 4, short, "nan"), *(of("safe", a, 4, long) for a in ARMS)]
    assert len(groups([*found, *ended], 40)["safe"].arms["exact"]) == 3
    assert groups(found, 10)["safe"].steps == 10


def test_the_document_has_a_line_for_each_arm_and_a_panel_for_each_series(tmp_path, capsys):
    for arm in ARMS:
        place = tmp_path / "runs" / f"safe_{arm}_1"
        place.mkdir(parents=True)
        rows = [{"step": step, **dict.fromkeys(SERIES.values(), 0.5)} for step in range(1, 31)]
        (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file, drawn = tmp_path / "study.json", tmp_path / "study.png"
    options = ["--least", "30", "--json", str(file), "--picture", str(drawn)]
    assert document.main([str(tmp_path / "runs"), *options]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2 + len(ARMS) and "| 0 of 1 |" in printed
    assert drawn.stat().st_size > 0
    assert document.main([str(file), "--least", "30"]) == 0
    assert capsys.readouterr().out == printed
    assert table(json.loads(file.read_text())["runs"], 31) == printed.splitlines()[:2]
