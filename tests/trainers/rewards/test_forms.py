"""What a reward function may return, in which signature it is called, and how long it may take."""

import signal
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from rl_consistency.trainers.config.sections import RewardSection
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.rewards.compute import TimeIsUp, compute_rewards, time_limit
from rl_consistency.trainers.rewards.function import (
    RewardError,
    RewardFunction,
    check_data,
    resolve,
)

EXAMPLES = [
    Example(id=i, prompt=f"p{i}", answer=str(i), target=str(i), extra={"level": i})
    for i in range(3)
]
COMPLETIONS = ["0", "wrong", "2"]
TOKENS = [[5], [6, 7], []]


def score(function, *, signature="ours", examples=EXAMPLES, **given):
    term = RewardFunction("mine", function, signature=signature, answer_field="solution")
    return compute_rewards([term], examples, COMPLETIONS, token_ids=TOKENS, **given).total


@pytest.mark.parametrize(
    "scores",
    [
        np.array([0.5, 0.0, 1.0]),
        np.array([0.5, 0.0, 1.0], dtype=np.float16),
        torch.tensor([0.5, 0.0, 1.0], dtype=torch.bfloat16),
        torch.tensor([0.5, 0.0, 1.0], requires_grad=True),
        [np.float32(0.5), np.bool_(False), np.array(1)],
        [torch.tensor(0.5), torch.tensor(0), torch.tensor(True)],
        (0.5, 0, True),
    ],
    ids=lambda scores: f"{type(scores).__name__} {getattr(scores, 'dtype', '')}",
)
def test_arrays_tensors_and_their_scalars_are_scores(scores):
    assert score(lambda **_: scores) == [0.5, 0.0, 1.0]


def test_signature_trl_gives_token_ids_and_the_columns_of_the_data():
    seen = {}

    def reward(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, ids=completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    assert score(reward, signature="trl") == [1.0, 2.0, 0.0]
    assert seen == {
        "prompts": ["p0", "p1", "p2"],
        "completions": COMPLETIONS,
        "ids": TOKENS,
        "solution": ["0", "1", "2"],
        "level": [0, 1, 2],
    }


def test_signature_trl_gives_conversations_as_messages():
    messages = ({"role": "user", "content": "hello"},)
    examples = [Example(id=0, prompt="<u>hello", answer="a", target="a", messages=messages)] * 3
    seen = {}

    def reward(prompts, completions, **_):
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * 3

    score(reward, signature="trl", examples=examples)
    assert seen["prompts"] == [[{"role": "user", "content": "hello"}]] * 3
    assert seen["completions"][1] == [{"role": "assistant", "content": "wrong"}]
    score(reward, examples=examples)
    assert (seen["prompts"], seen["completions"]) == (["<u>hello"] * 3, COMPLETIONS)


def test_the_signature_is_never_guessed():
    def of_trl(prompts, completions, completion_ids, **columns):
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="signature ours gives answers, completions, prompts"):
        check_data([RewardFunction("mine", of_trl)], EXAMPLES)
    check_data([RewardFunction("mine", of_trl, signature="trl")], EXAMPLES)
    with pytest.raises(RewardError, match="missing a required argument: 'answers'"):
        demanding = RewardFunction("mine", lambda answers, **_: [], signature="trl")
        check_data([demanding], EXAMPLES)


def test_a_built_in_function_has_our_signature_only():
    with pytest.raises(ValueError, match="gsm8k is built in, of signature ours"):
        RewardSection.model_validate({"functions": [{"name": "gsm8k", "signature": "trl"}]})


MODULE = """
import time

def judge(text):
    return float(text)

def raising(completions, **_):
    return [judge(text) for text in completions]

def slow(completions, **_):
    while True:
        try:
            time.sleep(10)
        except Exception:
            pass
"""


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """Takes a function's name to the term that a recipe would make of it."""
    (tmp_path / "placed_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "placed_rewards", raising=False)
    return lambda name: RewardFunction(name, resolve(name))


def test_an_exception_names_the_line_of_the_user_and_keeps_its_traceback(placed, tmp_path):
    with pytest.raises(RewardError) as caught:
        compute_rewards([placed("placed_rewards:raising")], EXAMPLES, COMPLETIONS)
    text = str(caught.value)
    assert text.endswith(f"'wrong'), at {tmp_path / 'placed_rewards.py'}, line 5")
    assert "\n" not in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None


def test_a_function_that_takes_too_long_is_ended_and_named_with_its_line(placed, tmp_path):
    started = time.perf_counter()
    with pytest.raises(RewardError) as caught:
        compute_rewards([placed("placed_rewards:slow")], EXAMPLES, COMPLETIONS, timeout=0.2)
    assert time.perf_counter() - started < 5
    text = str(caught.value)
    assert "'placed_rewards:slow' took longer than 0.2 s for 3 completions" in text
    assert f"at {tmp_path / 'placed_rewards.py'}, line 13" in text
    assert isinstance(caught.value.__cause__, TimeIsUp)


def test_a_function_in_time_leaves_no_handler_and_no_timer():
    before = signal.getsignal(signal.SIGRTMAX)
    assert score(lambda **_: [1.0] * 3, timeout=30) == [1.0] * 3
    assert signal.getsignal(signal.SIGRTMAX) is before


def test_a_time_limit_that_is_swallowed_is_raised_at_the_end():
    with pytest.raises(TimeIsUp), time_limit(0.05), suppress(BaseException):
        time.sleep(10)


def test_a_time_limit_leaves_alarms_to_others():
    def alarmed(**_):
        old = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        time.sleep(10)

    with pytest.raises(RewardError, match=r"took longer than 0\.2 s"):
        score(alarmed, timeout=0.2)


def test_a_run_gives_a_function_of_trl_the_tokens_that_it_sampled(tiny_run):
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write(
            "def length(prompts, completions, completion_ids, answer, **columns):\n"
            "    return [float(len(ids)) for ids in completion_ids]\n"
        )
    term = {"name": "toy_rewards:length", "signature": "trl"}
    _, rows = tiny_run(**{"reward.functions": [term], "training.steps": 1})
    assert rows[0]["reward/mean"] == rows[0]["completion/length_mean"]


@pytest.mark.parametrize("signature", ["ours", "trl"])
def test_a_function_that_changes_what_it_is_given_changes_no_example(signature):
    """A resumed run reads the data again, and a run that goes on has to see what it would read."""
    messages = ({"role": "user", "content": [{"text": "p"}]},)
    examples = [
        Example(id=i, prompt="p", answer="a", target="a", extra={"seen": [0]}, messages=messages)
        for i in range(3)
    ]

    def greedy(prompts, seen, **given):
        for prompt, each in zip(prompts, seen, strict=True):
            each.append(1)
            if signature == "trl":
                prompt[0]["content"].append("more")
        return [float(len(each)) for each in seen]

    for _ in range(2):
        assert score(greedy, signature=signature, examples=examples) == [2.0, 2.0, 2.0]
    assert messages[0]["content"] == [{"text": "p"}]
    assert all(example.extra == {"seen": [0]} for example in examples)
