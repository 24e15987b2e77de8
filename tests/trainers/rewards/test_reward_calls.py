"""Reward functions in files, of one completion at a time, as verl calls them, and reward models."""

import asyncio
import math
import re
import shutil
import sys
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from rl_consistency.trainers.config.data_sections import RewardFunctionSection, RewardSection
from rl_consistency.trainers.config.recipe import dump_config, load_config
from rl_consistency.trainers.data.examples import Example, examples_of
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy_files import PolicyError
from rl_consistency.trainers.reward_calls import source_digest
from rl_consistency.trainers.reward_functions import RewardError, resolve
from rl_consistency.trainers.reward_model import RewardModel
from rl_consistency.trainers.rewards import RewardFunction, check_data, compute_rewards
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError

EXTRA = {"level": 3, "data_source": "sums", "extra_info": {"index": 7}}
EXAMPLES = [
    Example(id=i, prompt=f"p{i}", answer=str(i), target=str(i), extra=EXTRA) for i in range(3)
]
TEXTS, IDS = ["0", "wrong", "2"], [[5], [6, 7], []]


def scores(function, **given):
    term = RewardFunction("mine", function, **given)
    check_data([term], EXAMPLES)
    return compute_rewards([term], EXAMPLES, TEXTS, token_ids=IDS).total


def right(completion, answer):
    return completion == answer


def of_everything(prompt, completion, answer, level, completion_ids, **extra):
    assert prompt[0] == "p" and set(extra) == {"data_source", "extra_info"}
    return level + len(completion_ids) + 0.5 * (completion == answer)


class Judge:
    def __call__(self, completion):
        return len(completion)


async def late(completion, answer):
    await asyncio.sleep(0)
    return completion == answer or None


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"index": 7}
    right = float(solution_str == ground_truth)
    return right if right else {"score": -1.0, "acc": 0}


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (right, {"per": "sample"}, [1, 0, 1]),
        (of_everything, {"per": "sample"}, [4.5, 5, 3.5]),
        (Judge(), {"per": "sample"}, [1, 5, 1]),
        (late, {"per": "sample"}, [1, pytest.approx(math.nan, nan_ok=True), 1]),
        (verl, {"signature": "verl"}, [1, -1, 1]),
        (lambda prompts, completions, answers, **_: [0.5] * 3, {}, [0.5] * 3),
    ],
)
@pytest.mark.filterwarnings("ignore:all reward functions returned None")
def test_a_function_is_called_as_it_wants_to_be(function, given, expected):
    assert scores(function, **given) == expected


def test_a_number_of_the_data_is_a_number_in_the_calls_of_trl_and_verl():
    rows = [{"question": "q", "answer": answer} for answer in (3, 2.5, "3")]
    examples = examples_of(("", row) for row in rows)
    assert [example.answer for example in examples] == ["3", "2.5", "3"]
    seen = dict[str, Any]()

    def trl(prompts, completions, answer, **_):
        seen["trl"] = answer
        return [0.0] * 3

    def verl(ground_truth, **_):
        seen.setdefault("verl", []).append(ground_truth)
        return 0.0

    def ours(prompts, completions, answers):
        seen["ours"] = answers
        return [0.0] * 3

    terms = [RewardFunction(f.__name__, f, signature=f.__name__) for f in (trl, verl, ours)]
    compute_rewards(terms, examples, TEXTS)
    assert seen == {"trl": [3, 2.5, "3"], "verl": [3, 2.5, "3"], "ours": ["3", "2.5", "3"]}


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (lambda text: 0.0, {"per": "sample"}, "missing a required argument: 'text'"),
        (
            lambda completion: [1.0],
            {"per": "sample"},
            r"returned \[1.0\], not a finite float32 or None",
        ),
        (lambda completion: 1 / len(completion[1:]), {"per": "sample"}, "ZeroDivision.*sample 0"),
        (lambda solution_str: 0.0, {"signature": "verl"}, "unexpected keyword argument"),
    ],
)
def test_what_is_wrong_of_it_is_named(function, given, message):
    with pytest.raises(RewardError, match=message):
        scores(function, **given)


def test_a_function_in_a_file_is_found_beside_the_recipe_and_may_import_its_neighbours(
    tmp_path, monkeypatch, tiny_run
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "recipes" / "rewards"
    folder.mkdir(parents=True)
    (folder / "neighbour_of_mine.py").write_text("HALF = 0.5\n")
    (folder / "my.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_mine import HALF\n"
        "@dataclass\nclass Score:\n    value: 'float'\n"
        "def half(completion):\n    return Score(HALF).value\n"
    )
    recipe = folder.parent / "recipe.yaml"
    named = {"reward.functions": [{"name": "rewards/my.py:half"}], "training.steps": 1}
    recipe.write_text(dump_config(tiny_run.config(**named)))
    config = load_config(recipe)
    assert config.reward.folder == recipe.parent
    assert scores(resolve("rewards/my.py:half", config.reward.folder), per="sample") == [0.5] * 3
    monkeypatch.chdir(folder)
    assert scores(resolve("my.py:half"), per="sample") == [0.5] * 3
    _, rows = tiny_run(**named, **{"reward.folder": str(recipe.parent)})
    assert rows[-1]["reward/rewards/my.py:half"] == 0.5
    (folder / "my.py").write_text((folder / "my.py").read_text() + "# edited\n")
    with pytest.raises(CheckpointError, match="reward function rewards/my.py:half: "):
        tiny_run(**named, **{"reward.folder": str(recipe.parent)}, resume=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.py:f", None, "there is no file .*none.py"),
        ("my.py:g", "def f(): ...", "my.py has no function 'g'"),
        ("my.py:f", "1 / 0\n", "cannot import .*ZeroDivisionError.*my.py, line 1"),
    ],
)
def test_a_file_without_the_function_is_named(tmp_path, monkeypatch, name, text, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    if text is not None:
        (tmp_path / "my.py").write_text(text)
    with pytest.raises(RewardError, match=message):
        resolve(name, tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of name, model is needed, got none"),
        ({"name": "gsm8k", "model": "a/b"}, "exactly one of name, model"),
        ({"model": "a/b", "per": "sample"}, "leave them out for a model"),
        ({"name": "m:f", "signature": "verl", "per": "sample"}, "leave per out"),
        ({"name": "gsm8k", "signature": "verl"}, "gsm8k is built in"),
    ],
)
def test_terms_that_contradict_themselves_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        RewardSection(functions=(RewardFunctionSection(**given),))


def test_the_digest_of_a_function_is_that_of_its_source():
    assert source_digest(right) != source_digest(verl)
    assert source_digest(right) == source_digest(right)
    made = [eval(text) for text in ("lambda completion: 1", "lambda completion: 2")]
    assert source_digest(made[0]) != source_digest(made[1])
    assert source_digest(Judge()) == source_digest(Judge())
    assert source_digest(partial(right, answer="2")) == source_digest(right)
    assert source_digest(partial(verl)) == source_digest(verl)


def test_code_without_a_source_has_one_digest_in_all_processes():
    """Addresses and the order of sets differ between processes."""
    made = []
    for items in ([0, 8], [8, 0], [0, 9]):
        names = dict[str, Any]()
        exec("def f(completions):\n    return sum(c in {1} for c in completions)\n", names)
        outer = names["f"].__code__
        (inner,) = (code for code in outer.co_consts if hasattr(code, "co_code"))
        inner = inner.replace(co_consts=(frozenset(items), *inner.co_consts))
        names["f"].__code__ = outer.replace(co_consts=(inner,))
        made.append(names["f"])
    first, same, other = map(source_digest, made)
    assert first == same != other


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The directory of a small reward model with a chat template."""
    directory, tokenizer = tmp_path_factory.mktemp("reward_model"), byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, **heads, vocab_size=272, num_labels=1, pad_token_id=256)
    Qwen3ForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_a_reward_model_s_score_depends_on_no_other_completion(classifier):
    model = RewardModel(classifier, "cpu")
    prompts, completions = ["2+2=", "1+1=", "a longer prompt "], ["4", "2, and more of it", "x"]
    together = model(prompts=prompts, completions=completions, completion_ids=[], answer=[])
    alone = [model([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert together == alone == model(prompts[::-1], completions[::-1])[::-1]
    assert len(set(alone)) == 3
    chat = [{"role": "user", "content": "1+1"}], [{"role": "assistant", "content": "2"}]
    assert model([chat[0]], [chat[1]]) == model(["u:1+1;"], ["a:2;"])
    with pytest.raises(ValueError, match="have 70 tokens, more than the 64 that the reward model"):
        model(["x" * 60], ["y" * 10])


def test_a_run_learns_from_a_reward_model_and_is_resumed_with_the_same_alone(
    tiny_run, classifier, tmp_path
):
    functions = [{"model": str(classifier), "weight": 2.0}, {"name": "toy_rewards:varied"}]
    changes = {"reward.functions": functions, "training.steps": 1}
    _, (row,) = tiny_run(**changes)
    score, varied = row[f"reward/{classifier.name}"], row["reward/toy_rewards:varied"]
    assert row["reward/mean"] == pytest.approx(2 * score + varied)
    moved = shutil.copytree(classifier, tmp_path / "elsewhere" / classifier.name)
    changes["reward.functions"] = [{**functions[0], "model": str(moved)}, functions[1]]
    tiny_run(**changes | {"training.steps": 2}, resume=True)
    text = (classifier / "config.json").read_text()
    (moved / "config.json").write_text(re.sub('"rms_norm_eps": .*,', "", text))
    with pytest.raises(CheckpointError, match=f"reward function {classifier.name}: "):
        tiny_run(**changes | {"training.steps": 2}, resume=True)


def test_a_directory_without_a_trained_head_is_no_reward_model(tiny_run):
    changes = tiny_run.save_model()
    with pytest.raises(PolicyError, match="do not fit its config.json: 1 missing keys.*score"):
        RewardModel(tiny_run.directory / "model", "cpu")
    assert changes["policy.path"]
