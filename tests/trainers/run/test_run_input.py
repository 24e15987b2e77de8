import json
from pathlib import Path

import pytest

from rl_consistency.trainers import run
from rl_consistency.trainers.data.examples import DataError
from rl_consistency.trainers.policy_files import PolicyError
from rl_consistency.trainers.run_directory.directory import RunDirectoryError


def from_file(tiny_run, **changes):
    return {"data.task": None, "data.path": str(tiny_run.example_file())} | changes


def test_a_model_directory_and_a_file_of_examples_run_as_well(tiny_run):
    evaluation = {"data.eval_path": str(tiny_run.example_file(5, "eval.jsonl"))}
    changes = from_file(tiny_run, **evaluation, **{"training.eval_every": 1})
    summary, rows = tiny_run(**tiny_run.save_model(), **changes)
    assert summary["consistency/mismatched_tokens"] == 0 and summary["eval/last"] is not None
    assert len(rows) == 4


DEMANDING = {"reward.functions": [{"name": "toy_rewards:demanding"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (DEMANDING, "toy_rewards:demanding' does not fit the data: missing .* 'level'"),
        ({"data.answer_field": "reply"}, "line 1: no field 'reply'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_directory_is_made(
    tiny_run, monkeypatch, changes, message
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tiny_run.directory))
    with pytest.raises(ValueError, match=message):
        tiny_run(**from_file(tiny_run, **changes))
    assert not (tiny_run.directory / "run").exists()


def test_a_stop_token_that_the_policy_has_not_is_named_before_the_warm_start(tiny_run):
    sampling = {"n": 2, "max_tokens": 9, "stop_token_ids": [3, 9999]}
    with pytest.raises(PolicyError, match="stop_token_ids: 9999 is outside the policy"):
        tiny_run(**{"rollout.sampling": sampling})
    assert not (tiny_run.directory / "run").exists()


@pytest.mark.parametrize(("character", "warm_start"), [("+", 0), ("5", 1)])
def test_a_token_beyond_the_vocabulary_is_named_before_the_directory_is_made(
    tiny_run, character, warm_start
):
    given = tiny_run.save_model() | from_file(tiny_run)
    file = tiny_run.directory / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"][character] = 5000
    file.write_text(json.dumps(content))
    example = {"question": "1+1=", "answer": "5"}
    Path(given["data.path"]).write_text(json.dumps(example) + "\n")
    given |= {"rollout.prompts_per_step": 1, "warm_start.steps": warm_start}
    with pytest.raises(DataError, match="token id 5000, outside the model's vocabulary of 2"):
        tiny_run(**given)
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
    with pytest.raises(DataError, match=r"train.jsonl, line 2: prompt and answer have 66 .* 64"):
        tiny_run(**changes)


@pytest.mark.parametrize("place", ["module", "function"])
def test_a_reward_function_that_turns_gradients_off_changes_no_bit(tiny_run, place):
    plain, _ = tiny_run.of_its_own("plain")
    off = "__import__('torch').set_grad_enabled(False)"
    at = {"module": "", "function": "", place: off}
    (tiny_run.directory / f"off_in_{place}.py").write_text(
        f"import toy_rewards\n{at['module']}\n"
        f"def varied(**given):\n    {at['function']}\n    return toy_rewards.varied(**given)\n"
    )
    found, _ = tiny_run(**{"reward.functions": [{"name": f"off_in_{place}:varied"}]})
    assert found["parameter_digest"] == plain["parameter_digest"]


@pytest.mark.parametrize("kind", ["file", "dangling", "looping"])
def test_what_is_no_directory_above_the_run_is_named_before_the_policy_is_loaded(
    tiny_run, monkeypatch, kind
):
    parent = tiny_run.directory / "parent"
    if kind == "file":
        parent.write_text("")
    else:
        parent.symlink_to(parent if kind == "looping" else tiny_run.directory / "absent")
    monkeypatch.setattr(run, "load_policy", None)
    for directory in (parent / "run", parent / "deep" / "run", parent):
        message = rf"run\.output_dir: {parent} is not a directory"
        with pytest.raises(RunDirectoryError, match=message):
            tiny_run(**{"run.output_dir": str(directory)})
