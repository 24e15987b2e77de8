"""Reward functions by name, and their sum over a batch.

A reward function takes parallel lists, one entry per completion, and returns one number for each:

    def brevity(prompts, completions, answers, **extra):
        return [1.0 / (1 + len(completion)) for completion in completions]

`extra` holds the further fields of the examples, each a list too. A recipe names a built-in
function or `package.module:function`, which must be importable (installed, or on PYTHONPATH).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import nan
from numbers import Real
from typing import Any

import torch

from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.data.foreign_files import one_line, shown
from rl_consistency.trainers.interrupts import interrupts_heard

LARGEST = (2 - 2**-23) * 2.0**127
"""Of float32, in which advantages are."""
RewardCallable = Callable[..., Any]
_ARGUMENTS = frozenset({"prompts", "completions", "answers"})
Texts = Sequence[str]


class RewardError(ValueError):
    """A reward function that cannot be found or gave no usable score; names it and the sample."""


def exact_match(prompts: Texts, completions: Texts, answers: Texts, **extra: Any) -> list[float]:
    """1 where completion and answer are equal, white space at the ends ignored, else 0."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, answers, strict=True)]


def gsm8k(prompts: Texts, completions: Texts, answers: Texts, **extra: Any) -> list[float]:
    """1 where the final numbers of completion and answer are equal, else 0.

    The final number is the first one after the last `####`, or without that mark the last number.
    `1,234`, `$1234` and `1234.0` are equal. An answer without a number is a ValueError.
    """
    scores = []
    for completion, answer in zip(completions, answers, strict=True):
        scores.append(float(final_number(completion) == _reference_number(answer)))
    return scores


def _reference_number(answer: str) -> Decimal:
    if (number := final_number(answer)) is None:
        raise ValueError(f"the reference answer {answer[-80:]!r} holds no number")
    return number


def arithmetic(prompts: Texts, completions: Texts, answers: Texts, **extra: Any) -> list[float]:
    """1 where the last of the comma-separated totals that end the completion is the answer."""
    totals = [completion.rstrip().rpartition(",")[2].strip() for completion in completions]
    return [float(total == answer) for total, answer in zip(totals, answers, strict=True)]


BUILT_IN: dict[str, RewardCallable] = {f.__name__: f for f in (exact_match, gsm8k, arithmetic)}

# A minus sign counts only where no number or closing bracket stands before it: 5-3 is 5 and 3.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?\d[\d,]*(?:\.\d+)?", re.ASCII)


def final_number(text: str) -> Decimal | None:
    """The final number of a GSM8K-style solution (see `gsm8k`), or None."""
    _, mark, tail = text.rpartition("####")
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal(numbers[0 if mark else -1].replace(",", "").replace("$", ""))


@dataclass(frozen=True)
class RewardFunction:
    """One term of the reward: its name in the recipe, and its factor in the sum."""

    name: str
    function: RewardCallable
    weight: float = 1.0


@dataclass(frozen=True)
class Rewards:
    """The rewards of a batch of completions, unweighted by function name and in all."""

    total: list[float]
    """Weighted sum per completion, added in the order of the functions."""
    by_function: dict[str, list[float]]


def resolve(name: str) -> RewardCallable:
    """The reward function of that name: built in, or `package.module:function`."""
    if ":" not in name:
        if name in BUILT_IN:
            return BUILT_IN[name]
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RewardError(
            f"unknown reward function {name!r}: {hint}Built in are {', '.join(BUILT_IN)}; your own "
            "is named package.module:function"
        )
    module_name, _, attribute = name.partition(":")
    try:
        with interrupts_heard(), torch.set_grad_enabled(torch.is_grad_enabled()):
            module = importlib.import_module(module_name)
            function = getattr(module, attribute, None)
    except BaseException as error:  # the module is others' code, as in _call
        if not isinstance(error, KeyboardInterrupt):
            problem = f"reward function {name!r}: cannot import {module_name!r}: {one_line(error)}"
            missing = isinstance(error, ImportError)
            remedy = "; install it or put its folder on PYTHONPATH" if missing else ""
            raise RewardError(problem + remedy) from error
        raise
    if not callable(function):
        raise RewardError(f"reward function {name!r}: {module_name} has no function {attribute!r}")
    return function


def check_data(functions: Sequence[RewardFunction], examples: Sequence[Example]) -> None:
    """RewardError where the fields of the data are not those that the functions take, or an answer
    holds no number for `gsm8k`.

    A batch hands over the fields of its examples, so a function has to take all fields of the data
    and may demand only those of every example.
    """
    names = [frozenset(example.extra) for example in examples]
    everywhere, anywhere = frozenset.intersection(*names), frozenset.union(*names)
    if taken := sorted(anywhere & _ARGUMENTS):
        raise RewardError(
            f"the data field {', '.join(taken)} has the name of an argument that every reward "
            "function takes: rename it in the data"
        )
    for term in functions:
        for example in examples if term.function is gsm8k else ():
            try:
                _reference_number(example.answer)
            except ValueError as error:
                raise RewardError(f"{example.place}: {error}: reward function gsm8k") from error
        try:
            signature = inspect.signature(term.function)
        except ValueError:
            continue  # written in C: its first call tells
        for fields in (everywhere, anywhere):
            try:
                signature.bind(**dict.fromkeys(_ARGUMENTS | fields))
            except TypeError as error:
                given = ", ".join(sorted(fields)) or "none"
                raise RewardError(
                    f"reward function {term.name!r} does not fit the data: {error}; beside prompt "
                    f"and answer the data has the fields {given} (take others with **extra)"
                ) from error


def compute_rewards(
    functions: Sequence[RewardFunction], examples: Sequence[Example], completions: Sequence[str]
) -> Rewards:
    """The rewards of `completions`; the i-th answers `examples[i]`.

    RewardError, naming function and sample, when a function raises or does not return one finite
    number within float32 for each completion.
    """
    if len(examples) != len(completions):
        raise ValueError(f"{len(completions)} completions for {len(examples)} examples")
    total = [0.0] * len(completions)
    by_function: dict[str, list[float]] = {}
    for term in functions:
        scores = _scores(term, examples, completions)
        by_function[term.name] = scores
        total = [sum_ + term.weight * score for sum_, score in zip(total, scores, strict=True)]
    if wrong := [i for i, value in enumerate(total) if not abs(value) <= LARGEST]:
        sample = _sample(wrong[0], examples, completions)
        raise RewardError(f"the weighted rewards add up to {total[wrong[0]]} for {sample}")
    return Rewards(total, by_function)


def _scores(
    term: RewardFunction, examples: Sequence[Example], completions: Sequence[str]
) -> list[float]:
    scores, error = _call(term, examples, completions)
    numbers = [_number(score) for score in scores] if type(scores) is list else []
    if error is not None:
        where = _failing_sample(term, examples, completions)
        problem = f"raised {one_line(error)} ({where})"
    elif type(scores) is not list:
        kind = type(scores).__name__
        problem = f"returned {kind}: it must return a list with one number per completion"
    elif len(scores) != len(completions):
        problem = (
            f"returned {len(scores)} scores for {len(completions)} completions: sample "
            f"{min(len(scores), len(completions))} is the first unmatched one"
        )
    elif wrong := [i for i, number in enumerate(numbers) if not abs(number) <= LARGEST]:
        sample = _sample(wrong[0], examples, completions)
        problem = f"returned {shown(scores[wrong[0]]):.60}, not a finite float32, for {sample}"
    else:
        return numbers
    raise RewardError(f"reward function {term.name!r} {problem}") from error


def _number(score: Any) -> float:
    """A score as a float; NaN where it is no number, or is beyond every float."""
    try:
        return float(score) if isinstance(score, Real) else nan
    except BaseException as error:  # others may have written its class
        if not isinstance(error, KeyboardInterrupt):
            return nan
        raise


def _call(
    term: RewardFunction, examples: Sequence[Example], completions: Sequence[str]
) -> tuple[Any, BaseException | None]:
    """The list the function returned, and what it raised: others write it, so that may be anything.

    An exit is one of them: no function may end a run as if it were done.
    """
    names = sorted({name for example in examples for name in example.extra})
    try:
        with interrupts_heard(), torch.set_grad_enabled(torch.is_grad_enabled()):
            scores = term.function(
                prompts=[example.prompt for example in examples],
                completions=list(completions),
                answers=[example.answer for example in examples],
                **{name: [example.extra.get(name) for example in examples] for name in names},
            )
            scores = list(scores) if isinstance(scores, list | tuple) else scores
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            return None, error
        raise
    return scores, None


def _failing_sample(
    term: RewardFunction, examples: Sequence[Example], completions: Sequence[str]
) -> str:
    """The first sample that also fails when the function is given it alone."""
    for index, (example, completion) in enumerate(zip(examples, completions, strict=True)):
        if _call(term, [example], [completion])[1] is not None:
            return _sample(index, examples, completions)
    return f"on the batch of {len(completions)}, on no sample of it alone"


def _sample(index: int, examples: Sequence[Example], completions: Sequence[str]) -> str:
    text = completions[index]
    shown = text if len(text) <= 80 else text[:77] + "..."
    return f"sample {index}, example {examples[index].id}, completion {shown!r}"
