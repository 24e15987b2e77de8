from itertools import combinations

import pytest
import yaml

from rl_consistency.trainers.config.mistakes import OTHER_NAMES, STANDS_IN
from rl_consistency.trainers.config.recipe import (
    ConfigError,
    RunConfig,
    all_paths,
    load_config,
    require_inputs,
)
from tests.trainers.conftest import RECIPE

MISTAKES = {
    "run.sead=3": "run.sead: unknown key; did you mean seed?",
    "policy.top_p=0.9": "policy.top_p: unknown key; did you mean rollout.sampling.top_p?",
    "data.max_prompt_tokns=3": "unknown key; did you mean max_prompt_tokens?",
    "data.task.num_terms=many": "data.task.num_terms: Input should be a valid integer",
    "data.prompt_template=x": "data: prompt_template must contain {prompt}",
    "reward.functions=[]": "reward: functions must name at least one reward function",
    "rollout.sampling.n=0": "rollout.sampling: n must be",
    "rollout.lr=1": "rollout.lr: unknown key; did you mean optimizer.learning_rate?",
    "rollout.prefill_chunk_size=99999": "rollout.prefill_chunk_size: 99999 exceeds the",
    "algorithm.epsilon_high=0.28": "did you mean algorithm.clip_high?",
    "algorithm.overlong_buffer=4": "algorithm.overlong_buffer: must be positive with",
    "optimizer.betas=[0.9]": "optimizer.betas.1: missing",
    "training.rollout_per_step=1": "training.rollout_per_step: unknown key",
    "consistency={strict: false, strict_except: [glu]}": "strict_except: has no meaning when",
    "tracking=3": "tracking: a section, {key: value, ...}, is wanted",
    "sampling={top_p: 1}": "sampling: unknown key; did you mean rollout.sampling?",
    "training.exponential_moving_average=1": "the keys here are steps, micro_batch_size",
}


@pytest.fixture
def problems_of(tmp_path):
    file = tmp_path / "recipe.yaml"
    reward = {"functions": [{"name": "exact_match"}]}
    file.write_text(yaml.safe_dump(RECIPE | {"reward": reward}))

    def problems_of(*overrides):
        with pytest.raises(ConfigError) as refused:
            load_config(file, overrides)
        return str(refused.value).splitlines()[1:]

    return problems_of


def test_mistakes_of_all_kinds_are_told_at_once_and_none_that_is_due_to_another(problems_of):
    alone = {override: problems_of(override) for override in MISTAKES}
    for override, text in MISTAKES.items():
        (problem,) = alone[override]
        assert text in problem
    for pair in combinations(MISTAKES, 2):
        if (
            len({override.partition(".")[0] for override in pair}) == 2
        ):  # a section's own rule waits
            assert sorted(problems_of(*pair)) == sorted(alone[pair[0]] + alone[pair[1]]), pair
    of_fields = [o for o in MISTAKES if o not in ("data.prompt_template=x", "reward.functions=[]")]
    assert len(problems_of(*of_fields)) == len(of_fields)


def test_files_that_are_missing_are_told_with_the_rest(problems_of, tmp_path):
    changes = ["policy.build=null", "policy.path=/nope/model", "data.task=null"]
    changes += ["data.path=/nope/train.jsonl", "tokenizer.kind=auto", "training.eval_every=0"]
    found = problems_of(*changes, "run.sead=1", "algorithm.overlong_buffer=4")
    assert found[2:] == [
        "  policy.path: there is no /nope/model",
        "  data.path: there is no /nope/train.jsonl",
    ]
    config = load_config(tmp_path / "recipe.yaml", changes)
    with pytest.raises(ConfigError, match=r"2 inputs.*\n  policy.path: .*\n  data.path: there"):
        require_inputs(config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("training.learning_rate=1", "mean optimizer.learning_rate or warm_start.learning_rate?"),
        ("reward.name=x", "mean reward: {functions: [{name: ...}]}?"),
        ("reward.functions.0.wieght=1", "did you mean weight?"),
        ("reward.functions=exact_match", "write [{name: exact_match}]"),
        ("data.sources=a.jsonl", "write [{path: a.jsonl}]"),
        ("reward.functions='a: b: c'", "a list is wanted, got"),
        ("algorithm.dynamic_sampling=true", "a section, {key: value, ...}, is wanted"),
        ("tracking.wandb=p", "a section, {key: value, ...}, is wanted"),
        ("optimizer.betas=0.9,0.95", "write [0.9,0.95]"),
        ("policy.dtype=bf16", "did you mean bfloat16?"),
        ("policy.dtype=half", "did you mean bfloat16?"),
        ("policy.dtype=fp32", "did you mean float32?"),
    ],
)
def test_what_was_meant_is_told_in_words_of_a_recipe(problems_of, change, told):
    (problem,) = problems_of(change)
    assert told in problem and "Section" not in problem


def test_a_rule_about_a_key_that_is_wrong_itself_waits(problems_of):
    """It may only fail for what stands in its place."""
    for changes in (
        ["rollout.sampling={max_tokens: 60, n: x}"],  # 60 tokens do not fit, and may be wrong too
        ["algorithm.updates_per_rollout=7", "rollout.prompts_per_step=x"],
    ):
        assert len(problems_of(*changes)) == 1, changes


def test_every_override_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    with pytest.raises(
        ConfigError, match=r"override a: expected .*\noverride b.c=\[1 is not valid"
    ):
        load_config(file, ["a", "training.steps=1", "b.c=[1"])


def test_names_of_others_lead_to_keys_that_exist():
    assert set(OTHER_NAMES.values()) <= {*all_paths()}
    RunConfig.model_validate(STANDS_IN | {"tokenizer": {"kind": "auto"}})


@pytest.fixture
def data_file(tmp_path):
    """A file of these lines, which a recipe may have in place of its task."""

    def data_file(*lines):
        (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return ["data.task=null", f"data.path={tmp_path}/rows.jsonl", "training.eval_every=0"]

    return data_file


GOOD = '{"question": "1+1=", "answer": "2"}'
INPUTS = {
    "reward.functions=[{name: exact_mach}]": "unknown reward function 'exact_mach': did you mean",
    "reward.functions=[{name: 'nope.mod:f'}]": "cannot import 'nope.mod'",
    "reward.functions=[{name: 'nope.py:f'}]": "there is no file",
}


@pytest.mark.parametrize(("change", "told"), INPUTS.items())
def test_reward_functions_and_first_rows_are_looked_up_with_the_keys(
    problems_of, data_file, change, told
):
    for lines, of_data in (
        (['{"prompt": "1+1="}'], "line 1: no field 'question'"),
        ([GOOD, "{'question': 1}"], "line 2: not JSON in UTF-8"),
        ([""], "line 1: blank"),
    ):
        found = problems_of(*data_file(*lines), change, "run.sead=1")
        assert len(found) == 3 and "run.sead" in found[0]
        assert of_data in found[1] and "data.path" in found[1]
        assert told in found[2] and "reward.functions.0" in found[2]
    assert len(problems_of(*data_file(GOOD), "run.sead=1")) == 1


def test_inputs_are_looked_at_before_weights_are_loaded(tmp_path, problems_of, data_file):
    changes = [*data_file('{"prompt": "1+1="}'), "reward.functions=[{name: mine}, {name: gsm9k}]"]
    config = load_config(tmp_path / "recipe.yaml", changes)
    with pytest.raises(ConfigError) as refused:
        require_inputs(config, given=["mine"])
    (count, data, reward) = str(refused.value).splitlines()
    assert count.startswith("2 ") and "no field 'question'" in data and "gsm9k" in reward
