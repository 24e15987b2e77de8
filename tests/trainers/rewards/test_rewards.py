"""What reward functions are given, what they may return, how long they may take, and ours."""

import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch

from rl_consistency.trainers import rewards
from rl_consistency.trainers.config.data_sections import RewardSection
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.foreign_calls import TimeIsUp, time_limit
from rl_consistency.trainers.reward_functions import (
    RewardError,
    arithmetic,
    exact_match,
    gsm8k,
    resolve,
)
from rl_consistency.trainers.rewards import RewardFunction, check_data, compute_rewards

EXAMPLES = [
    Example(id=40 + i, prompt=f"p{i}", answer=str(i), target=str(i), extra={"level": i})
    for i in range(3)
]
COMPLETIONS = ["0", "wrong", "2"]
TOKENS = [[5], [6, 7], []]


class IdsInACall:
    def __call__(self, completion_ids, **_):
        return [len(ids) for ids in completion_ids]


def score(function, *, signature="ours", examples=EXAMPLES, **given):
    term = RewardFunction("mine", function, signature=signature, answer_field="solution")
    return compute_rewards([term], examples, COMPLETIONS, token_ids=TOKENS, **given).total


def refusal(function):
    with pytest.raises(RewardError) as caught:
        score(function)
    return caught.value


def test_exact_match_ignores_only_surrounding_space():
    assert exact_match(["p"] * 4, [" 3\n", "3 ", "3.", ""], ["3"] * 4) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so it is\n#### 18", "9 * 2 = 18\n#### 18", 1),
        ("18", "#### 18", 1),
        ("it makes 3, then 18.", "#### 18", 1),
        ("#### 1,234", "#### 1234", 1),
        ("#### $1,234.00", "#### 1234", 1),
        ("-5", "#### -5", 1),
        ("10-5", "#### 5", 1),
        ("10-5", "#### -5", 0),
        ("#### 17 or 18", "#### 18", 0),
        ("#### 17\n#### 18", "#### 18", 1),
        ("18 ####", "#### 18", 0),
        ("#### 180", "#### 18", 0),
        ("no number", "#### 18", 0),
        ("", "#### 18", 0),
        ("#### ٣", "#### 3", 0),
    ],
)
def test_gsm8k_compares_final_numbers(completion, answer, expected):
    assert gsm8k(["p"], [completion], [answer]) == [expected]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("8,10,18", 1), ("18", 1), (" 8, 18 \n", 1), ("8,10,18,", 0), ("8,118", 0), ("8,18x", 0)],
)
def test_arithmetic_reads_the_last_total(completion, expected):
    assert arithmetic(["p"], [completion], ["18"]) == [expected]


def test_a_function_of_a_module_resolves(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def ones(completions, **_): return [1] * len(completions)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert score(resolve("my_rewards:ones")) == [1.0, 1.0, 1.0]
    sys.modules.pop("my_rewards")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gms8k", "did you mean gsm8k"),
        ("nothing", "Built in are exact_match, gsm8k, arithmetic"),
        ("no.such.module:f", "cannot import 'no.such.module'"),
        ("math:no_such", "math has no function 'no_such'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_an_unknown_function_is_refused(name, message):
    with pytest.raises(RewardError, match=message):
        resolve(name)


def test_the_total_is_the_weighted_sum_in_order():
    functions = [
        RewardFunction("exact_match", exact_match, 2.0),
        RewardFunction("level", lambda level, **_: level, 0.5),
    ]
    rewards = compute_rewards(functions, EXAMPLES, COMPLETIONS)
    assert rewards.by_function == {"exact_match": [1.0, 0.0, 1.0], "level": [0.0, 1.0, 2.0]}
    assert rewards.total == [2.0, 0.5, 3.0]


def test_a_function_receives_texts_and_further_fields_by_name():
    seen = {}

    def spy(**columns):
        seen.update(columns)
        return [0.0] * 3

    score(spy)
    assert seen == {
        "prompts": ["p0", "p1", "p2"],
        "completions": COMPLETIONS,
        "answers": ["0", "1", "2"],
        "completion_ids": TOKENS,
        "level": [0, 1, 2],
    }


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda prompts, completions, answers, level: [0.0] * 3, False),
        (
            lambda prompts, completions, answers, level, completion_ids: [
                *map(len, completion_ids)
            ],
            True,
        ),
        (lambda completion_ids=None, **_: [*map(len, completion_ids)], True),
        (partial(lambda scale, **given: [*map(len, given["completion_ids"])], 1), True),
        (IdsInACall(), True),
    ],
)
def test_our_signature_gives_token_ids_to_a_function_that_takes_them(function, given):
    check_data([RewardFunction("mine", function)], EXAMPLES)
    assert score(function) == ([1.0, 2.0, 0.0] if given else [0.0] * 3)


def test_what_a_function_raises_is_named_with_its_sample_and_chained():
    error = refusal(lambda completions, **_: [float(text) for text in completions])
    assert "'mine' raised ValueError" in str(error)
    assert "sample 1, example 41, completion 'wrong'" in str(error)
    assert isinstance(error.__cause__, ValueError)


def silent(self):
    raise RuntimeError("no text")


class Silent(Exception):
    __str__ = __repr__ = silent


class SilentNumber(float):
    __float__ = __repr__ = silent


def raises_silent(**_):
    raise Silent


def test_an_exception_that_cannot_be_shown_is_named_by_its_type():
    text = r"'mine' raised Silent: \(str raised RuntimeError\) \(sample 0, example 40"
    assert re.search(text, str(refusal(raises_silent)))


def test_an_exception_that_is_shown_as_it_is_raises_another(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(rewards, "one_line", str)
    with pytest.raises(RuntimeError, match="no text"):
        score(raises_silent)


def test_what_a_function_raises_is_told_in_one_line_of_bounded_length():
    def raises(**_):
        raise ValueError("first\nsecond\n" * 1000)

    assert "'mine' raised ValueError: first second first" in (text := str(refusal(raises)))
    assert "\n" not in text and len(text) < 500


@pytest.mark.parametrize("value", [Silent(), SilentNumber(1)], ids=["no number", "number"])
def test_a_score_that_cannot_be_shown_is_named_with_its_sample(value):
    text = str(refusal(lambda **_: [0.0, value, 1.0]))
    assert "'mine' returned (repr raised RuntimeError), not a finite" in text
    assert "sample 1, example 41" in text


def test_a_list_that_cannot_be_read_is_named_by_what_it_raises():
    class Unreadable(list):
        def __iter__(self):
            raise Silent

    assert "'mine' raised Silent" in str(refusal(lambda **_: Unreadable([0.0] * 3)))


def test_a_failure_of_the_batch_only_says_so():
    def fails_on_three(completions, **_):
        return [0.0] if len(completions) == 1 else {}["x"]

    assert "on the batch of 3, on no sample of it alone" in str(refusal(fails_on_three))


def exits(**_):
    raise SystemExit(0)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_function_that_exits_ends_no_run_as_if_it_were_done(error):
    def leaves(**_):
        raise error

    assert f"'mine' raised {error.__name__}" in str(refusal(leaves))


def test_a_function_that_is_just_called_ends_the_run_as_if_it_were_done(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(rewards, "_call", lambda term, *_: (term.function(), None))
    with pytest.raises(SystemExit) as exit_:
        score(exits)
    assert exit_.value.code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def f(:", r"SyntaxError: invalid syntax \(broken_rewards.py, line 1\)"),
        ("\n1 / 0", "ZeroDivisionError: division by zero, at .*/broken_rewards.py, line 2"),
        ("def __getattr__(name): raise RuntimeError(name)", "RuntimeError: "),
        ("class E(Exception):\n def __str__(self): 1 / 0\nraise E", "E: .str raised ZeroDivision"),
        ("raise ImportError('two\\nlines')", "ImportError: two lines, at .*, line 1; install"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=f"cannot import 'broken_rewards': {message}"):
        resolve("broken_rewards:f")
    sys.modules.pop("broken_rewards", None)


def test_weighted_rewards_that_overflow_are_refused():
    huge = [RewardFunction(name, lambda **_: [0.0, 1.0, 0.0], 1e308) for name in ("a", "b")]
    with pytest.raises(RewardError, match="add up to inf for sample 1, example 41"):
        compute_rewards(huge, EXAMPLES, COMPLETIONS)


def test_an_interrupt_passes_through():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), -float("inf"), "1", 10**400, 1e39, -(10**39)),
        *(np.float32("nan"), torch.tensor(float("inf")), np.str_("1"), torch.ones(2)),
    ],
)
def test_a_score_that_is_no_finite_number_is_named_with_its_sample(value):
    text = str(refusal(lambda **_: [0.0, value, value]))
    assert "'mine' returned" in text and "sample 1, example 41, completion 'wrong'" in text


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([0.0, 1.0], "2 scores for 3 completions: sample 2"),
        ([0.0] * 4, "4 scores for 3 completions: sample 3"),
        (1.0, "returned float"),
        (None, "returned NoneType"),
        (np.zeros((3, 1)), r"returned ndarray of shape (3, 1)"),
        (torch.tensor(1.0), "returned Tensor of shape ()"),
    ],
)
def test_the_wrong_number_of_scores_is_refused(scores, message):
    assert message in str(refusal(lambda **_: scores))


def test_a_gsm8k_answer_without_a_number_is_an_error_of_the_data():
    example = Example(id=3, prompt="p", answer="none", target="none")
    with pytest.raises(RewardError, match=r"'none' holds no number .*sample 0, example 3"):
        compute_rewards([RewardFunction("gsm8k", gsm8k)], [example], ["5"])


@pytest.mark.parametrize(
    ("function", "extra", "message"),
    [
        (exact_match, [{"answers": 1}, {}], "answers has the name of an argument"),
        (exact_match, [{"completion_ids": 1}, {}], "completion_ids has the name of an argument"),
        (lambda level, **_: [], [{}, {}], "missing a required argument: 'level'"),
        (lambda level, **_: [], [{"level": 1}, {}], "missing a required argument: 'level'"),
        (lambda prompts, completions, answers: [], [{}, {"x": 1}], "unexpected .* 'x'"),
    ],
)
def test_fields_that_do_not_fit_a_function_are_refused(function, extra, message):
    examples = [
        Example(id=i, prompt="p", answer="a", target="a", extra=e) for i, e in enumerate(extra)
    ]
    with pytest.raises(RewardError, match=message):
        check_data([RewardFunction("mine", function)], examples)


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
    def of_trl(prompts, completions, completion_ids, answer, **columns):
        return [0.0] * len(completions)

    ours = "signature ours gives answers, completion_ids, completions, prompts"
    with pytest.raises(RewardError, match=ours):
        check_data([RewardFunction("mine", of_trl)], EXAMPLES)
    check_data([RewardFunction("mine", of_trl, signature="trl", answer_field="answer")], EXAMPLES)
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
