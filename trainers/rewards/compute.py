"""The rewards of a batch: each function is called once, and what it returned is checked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.data.foreign_files import one_line, shown
from rl_consistency.trainers.interrupts import interrupts_heard
from rl_consistency.trainers.rewards.function import RewardError, RewardFunction

LARGEST = (2 - 2**-23) * 2.0**127
"""Largest number of float32, in which advantages are."""


@dataclass(frozen=True)
class Rewards:
    """The rewards of a batch of completions, unweighted by function name and in all."""

    total: list[float]
    """Weighted sum per completion, added in the order of the functions."""
    by_function: dict[str, list[float]]


def compute_rewards(
    functions: Sequence[RewardFunction],
    examples: Sequence[Example],
    completions: Sequence[str],
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    timeout: float | None = None,
) -> Rewards:
    """The rewards of `completions`; the i-th answers `examples[i]`.

    `token_ids` are those of the completions, which a function of signature trl is given. `timeout`
    is in seconds, of one call of a function.

    RewardError, naming function and sample, when a function raises, takes too long, or does not
    return one finite number within float32 for each completion.
    """
    batch = _Batch(examples, completions, token_ids or [[]] * len(examples), timeout)
    total = [0.0] * len(completions)
    by_function: dict[str, list[float]] = {}
    for term in functions:
        scores = _scores(term, batch)
        by_function[term.name] = scores
        total = [sum_ + term.weight * score for sum_, score in zip(total, scores, strict=True)]
    if wrong := [i for i, value in enumerate(total) if not abs(value) <= LARGEST]:
        value, sample = total[wrong[0]], batch.sample(wrong[0])
        raise RewardError(f"the weighted rewards add up to {value} for {sample}")
    return Rewards(total, by_function)


class TimeIsUp(BaseException):
    """The block took too long. No Exception: code that retries on those must not go on."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeIsUp` in the block after so many seconds; None lets it take any time.

    It is raised between two steps of Python or out of a waiting system call, and once more at the
    end of the block where it was swallowed. A library that computes without end is not interrupted.
    ValueError outside the main thread, where Python runs no handlers.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a time limit needs the main thread: set reward.timeout to null")
    raised: list[TimeIsUp] = []
    ended = False

    def end(*_: Any) -> None:
        if not ended:
            raised.append(TimeIsUp())
            raise raised[0]

    number = signal.SIGRTMAX  # judges of mathematics use SIGALRM themselves
    before = signal.signal(number, end)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), number))
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            ended = True
    finally:
        timer.cancel()
        timer.join()
        signal.signal(number, before)
    if raised:
        raise raised[0]


@dataclass(frozen=True)
class _Batch:
    examples: Sequence[Example]
    completions: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    timeout: float | None

    def sample(self, index: int) -> str:
        """A sample, as messages name it."""
        text = shown(self.completions[index])
        return f"sample {index}, example {self.examples[index].id}, completion {text:.80}"


def _scores(term: RewardFunction, batch: _Batch) -> list[float]:
    scores, error = _call(term, batch)
    count = len(batch.completions)
    numbers = [_number(score) for score in scores] if type(scores) is list else []
    if isinstance(error, TimeIsUp):
        limit = f"{batch.timeout:g} s for {count} completions (reward.timeout)"
        problem = f"took longer than {limit}{term.place_of(error)}: raise it or give up earlier"
    elif error is not None:
        problem = f"raised {one_line(error)} ({_failing_sample(term, batch)}){term.place_of(error)}"
    elif type(scores) is not list:
        shape = f" of shape {tuple(scores.shape)}" if _is_array(scores) else ""
        needed = "a list, a NumPy array or a tensor with one number per completion"
        problem = f"returned {type(scores).__name__}{shape}: it must return {needed}"
    elif len(scores) != count:
        first = f"sample {min(len(scores), count)} is the first unmatched one"
        problem = f"returned {len(scores)} scores for {count} completions: {first}"
    elif wrong := [i for i, number in enumerate(numbers) if not abs(number) <= LARGEST]:
        value, sample = shown(scores[wrong[0]]), batch.sample(wrong[0])
        problem = f"returned {value:.60}, not a finite float32, for {sample}"
    else:
        return numbers
    raise RewardError(f"reward function {term.name!r} {problem}") from error


def _is_array(value: Any) -> TypeGuard[np.ndarray | np.generic | Tensor]:
    return isinstance(value, np.ndarray | np.generic | Tensor)


def _number(score: Any) -> float:
    """A score as a float; NaN where it is no number, or is beyond every float."""
    try:
        score = score.item() if _is_array(score) and not score.shape else score
        return float(score) if isinstance(score, Real) else nan
    except BaseException as error:  # others may have written its class
        if not isinstance(error, KeyboardInterrupt):
            return nan
        raise


def _call(term: RewardFunction, batch: _Batch) -> tuple[Any, BaseException | None]:
    """The list the function returned, and what it raised: others write it, so that may be anything.

    An exit is one of them: no function may end a run as if it were done.
    """
    given = term.arguments(batch.examples, batch.completions, batch.token_ids)
    try:
        with (
            interrupts_heard(),
            torch.set_grad_enabled(torch.is_grad_enabled()),
            time_limit(batch.timeout),
        ):
            scores = term.function(**given)
            if isinstance(scores, list | tuple):
                scores = list(scores)
            elif _is_array(scores) and len(scores.shape) == 1:
                scores = scores.tolist()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            return None, error
        raise
    return scores, None


def _failing_sample(term: RewardFunction, batch: _Batch) -> str:
    """The first sample that also fails when the function is given it alone."""
    for index in range(len(batch.completions)):
        one = slice(index, index + 1)
        lists = batch.examples[one], batch.completions[one], batch.token_ids[one]
        if _call(term, _Batch(*lists, batch.timeout))[1] is not None:
            return batch.sample(index)
    return f"on the batch of {len(batch.completions)}, on no sample of it alone"
