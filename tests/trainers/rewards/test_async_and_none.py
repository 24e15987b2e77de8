"""Rewards of `async` functions, and of functions that do not apply."""

import asyncio
import threading

import numpy as np
import pytest

from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.reward_functions import RewardError
from rl_consistency.trainers.rewards import RewardFunction, compute_rewards, known

EXAMPLES = [Example(id=40 + i, prompt="p", answer="a", target="a") for i in range(3)]
COMPLETIONS = ["0", "wrong", "2"]


def score(function, **given):
    return compute_rewards([RewardFunction("mine", function)], EXAMPLES, COMPLETIONS, **given).total


def exits(**_):
    raise SystemExit(0)


def divides(**_):
    return 1 / 0


@pytest.mark.parametrize("signature", ["ours", "trl"])
def test_none_says_that_a_function_does_not_apply(signature):
    def odd(completions, **_):
        return [None, 1.0, None]

    terms = [
        RewardFunction("odd", odd, 2.0, signature),
        RewardFunction("zeros", lambda **_: np.array([0.5, 0.5, None]), 1.0, signature),
    ]
    with pytest.warns(UserWarning, match="None for sample 2, example 42, .*1 such.*advantage is 0"):
        found = compute_rewards(terms, EXAMPLES, COMPLETIONS)
    assert found.by_function == {"odd": [None, 1.0, None], "zeros": [0.5, 0.5, None]}
    assert found.total[:2] == [0.5, 2.5] and np.isnan(found.total[2])
    assert known(found.total) == [0.5, 2.5] and known([None, 3.0]) == [3.0]


def asynchronous(function):
    async def called(**given):
        await asyncio.sleep(0)
        return function(**given)

    return called


def test_an_async_function_is_awaited_always_on_one_loop():
    loops = []

    def lengths(completions, **_):
        loops.append(asyncio.get_running_loop())
        return list(map(len, completions))

    async def in_a_notebook():  # whose thread runs a loop already
        return score(asynchronous(lengths))

    for found in (score(asynchronous(lengths)), asyncio.run(in_a_notebook())):
        assert found == [1.0, 5.0, 1.0]
    assert loops[0] is loops[1]


@pytest.mark.parametrize("function, message", [(exits, "SystemExit"), (divides, "ZeroDivision")])
def test_what_an_async_function_raises_is_named(function, message):
    with pytest.raises(RewardError, match=f"'mine' raised {message}"):
        score(asynchronous(function))
    assert score(asynchronous(lambda **_: [1] * 3)) == [1.0] * 3  # the loop goes on


def test_an_async_function_that_takes_too_long_is_cancelled():
    ended = threading.Event()

    async def slow(**_):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(RewardError, match="took longer than 0.1 s"):
        score(slow, timeout=0.1)
    assert ended.wait(5)
