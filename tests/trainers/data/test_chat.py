"""Prompts through a chat template, and prompts that are too long."""

import json
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_consistency.trainers.data import prompts
from rl_consistency.trainers.data.examples import DataError, Example
from rl_consistency.trainers.data.prompts import all_templated, require_template, templated
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.step_files import read_rows
from tests.trainers.conftest import read_jsonl

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'other' %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TURNS = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1"}]


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(tmp_path, prompt, **given):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"question": prompt, "answer": "2"}) + "\n")
    (example,) = read_jsonl(file, conversations=True, **given)
    return example


@pytest.mark.parametrize(
    ("prompt", "text"), [(TURNS, "s:S;u:1+1;a:"), ("1+1", "u:1+1;a:"), ("{{ 1 }}", "u:{{ 1 }};a:")]
)
def test_a_conversation_and_a_text_go_through_the_template(tmp_path, tokenizer, prompt, text):
    example = templated(read(tmp_path, prompt), tokenizer)
    assert example.prompt == text
    messages = list(example.messages)
    assert messages == (prompt if isinstance(prompt, list) else messages)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == whole


def looped(inner):
    return "{% for i in range(100000) %}" + inner + "{% endfor %}"


def doubled(times, shown=""):
    text = "{% set n.s = n.s ~ n.s %}"
    loop = f"{{% for i in range({times}) %}}{text}{{% endfor %}}{shown}"
    return "{% set n = namespace(s='x') %}" + loop


CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
ENDLESS = {
    "a loop in a loop": (looped(looped(looped(""))), "takes more than 0.5 s for 64 prompts"),
    "a macro that calls itself": (CALLS, "takes more than 0.5 s"),
    "too long a range": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    "a text that doubles": (doubled(60), "MemoryError|takes more than 0.5 s"),
    "a long text": (doubled(25, "{{ n.s }}"), "33,554,432 characters, more than"),
    "a text times a number": ("{{ 'x' * 10**13 }}", "MemoryError"),
}


@pytest.mark.parametrize(("template", "message"), ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_named_and_ended(tokenizer, monkeypatch, template, message):
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.5)
    monkeypatch.setattr(prompts, "TEMPLATE_BYTES", 2**28)
    tokenizer.chat_template, tokenizer.name_or_path = template, "/models/mine"
    example = Example(id=3, prompt="p", answer="a", target="a")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=message) as error:
        all_templated([example], tokenizer)
    assert "the chat template of the tokenizer '/models/mine'" in str(error.value)
    assert "example 3" in str(error.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_template_is_applied_to_all_examples_in_their_order(tokenizer):
    examples = [Example(id=i, prompt=f"{i}+1", answer="a", target="a") for i in range(130)]
    found = all_templated(examples, tokenizer)
    assert [example.prompt for example in found] == [f"u:{i}+1;a:" for i in range(130)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(all_templated, examples, tokenizer).result() == found


def test_a_prompt_template_is_applied_to_the_text_first(tmp_path, tokenizer):
    example = read(tmp_path, "1+1", prompt_template="Add {prompt}!")
    assert templated(example, tokenizer).prompt == "u:Add 1+1!;a:"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "must end with a message to answer"),
        ([*TURNS, {"role": "assistant", "content": "2"}], "must end with a message to answer"),
        ([{"role": "user"}], "message 0 must be an object with a role and a content"),
        ([TURNS[0], "hello"], "message 1 must be"),
        ([{"role": "user", "content": [{"type": "image"}]}], "images are not covered"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused_with_their_line(tmp_path, prompt, message):
    with pytest.raises(DataError, match=f"data.jsonl, line 1: 'question'.*{message}"):
        read(tmp_path, prompt)


@pytest.mark.parametrize("given", [{"conversations": False}, {"prompt_template": "Q: {prompt}"}])
def test_messages_without_the_key_or_with_a_text_template_are_refused(tmp_path, given):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"question": TURNS, "answer": "2"}) + "\n")
    with pytest.raises(DataError, match=r"is a list of messages: set data\.chat_template to true"):
        read_jsonl(file, **{"conversations": True} | given)


def test_what_a_template_refuses_is_told_with_the_example(tokenizer):
    example = Example(id=4, prompt="", answer="a", target="a", messages=[{"role": "other"}])
    with pytest.raises(DataError, match="example 4: .*does not take the messages .*no such role"):
        templated(example, tokenizer)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match="has no chat template: set it to false"):
        require_template(byte_tokenizer())


@pytest.fixture
def chat(tiny_run, tokenizer):
    """Changes of the tiny recipe: a saved model with a chat template, sums of 5 to 7 letters."""
    return {
        **tiny_run.save_model(tokenizer=tokenizer, seed=3),
        "data.task": None,
        "data.path": str(tiny_run.example_file()),
        "data.chat_template": True,
        "data.max_prompt_tokens": 9,
        "training.steps": 1,
    }


def test_a_run_with_a_chat_template_and_dropped_prompts(tiny_run, chat):
    """Ten sums have 4 letters, and 9 tokens with the template; 10 have 10."""
    told = []
    changes = chat | {"data.overlong_prompts": "drop", "tracking.samples": 8}
    _, rows = tiny_run(**changes, announce=told.append)
    assert rows[0] == {"step": 0, "data/overlong_prompts": 10}
    assert "10 training prompts are too long: dropped" in told
    (row,) = read_rows(tiny_run.directory / "run" / "samples.jsonl")
    prompts = {sample["prompt"] for sample in row["samples"]}
    assert len(prompts) == 4
    assert all(p.startswith("u:") and p.endswith("=;a:") and len(p) <= 9 for p in prompts)


def test_a_dropped_prompt_moves_no_answer_to_another(tiny_run, chat):
    """The first lines are the long ones: an example's place in the file is not that in the set."""
    file = tiny_run.directory / "train.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[::-1]))
    tiny_run(**chat | {"data.overlong_prompts": "drop", "tracking.samples": 8})
    (row,) = read_rows(tiny_run.directory / "run" / "samples.jsonl")
    for sample in row["samples"]:
        one, other = sample["prompt"][2:-4].split("+")
        assert int(one) + int(other) == int(sample["answer"])


def test_another_choice_is_refused_when_a_run_resumes(tiny_run, chat):
    changes = chat | {"data.overlong_prompts": "truncate"}
    told = []
    tiny_run(**changes, announce=told.append)
    assert "10 training prompts are too long: cut from the left" in told
    resumed = changes | {"training.steps": 2}
    for other in ({"data.overlong_prompts": "drop"}, {"data.chat_template": False}):
        with pytest.raises(CheckpointError, match=next(iter(other)).replace(".", r"\.")):
            tiny_run(**resumed | other, resume=True)
    tiny_run(**resumed, resume=True)


def test_too_few_prompts_after_dropping_are_refused(tiny_run, chat):
    few = {"data.overlong_prompts": "drop", "rollout.prompts_per_step": 12}
    with pytest.raises(DataError, match="exceeds the 10 training examples of .*10 overlong ones"):
        tiny_run(**chat | few)
