"""The reward functions that a recipe names without a module."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from traceback import walk_tb
from typing import Any

import torch

from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.config.sections import RewardSignature
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.data.foreign_files import one_line
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.interrupts import interrupts_heard

Texts = Sequence[str]


def exact_match(prompts: Texts, completions: Texts, answers: Texts, **extra: Any) -> list[float]:
    """1 where completion and answer are equal, white space at the ends ignored, else 0."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, answers, strict=True)]


def gsm8k(prompts: Texts, completions: Texts, answers: Texts, **extra: Any) -> list[float]:
    """1 where the final numbers of completion and answer are equal, else 0.

    The final number is the first one after the last `####`, or without that mark the last number.
    `1,234`, `$1234` and `1234.0` are equal. An answer without a number is a ValueError.
    """
    pairs = zip(completions, answers, strict=True)
    return [float(final_number(c) == reference_number(a)) for c, a in pairs]


def arithmetic(prompts: Texts, completions: Texts, answers: Texts, **extra: Any) -> list[float]:
    """1 where the last of the comma-separated totals that end the completion is the answer."""
    totals = [completion.rstrip().rpartition(",")[2].strip() for completion in completions]
    return [float(total == answer) for total, answer in zip(totals, answers, strict=True)]


BUILT_IN = {f.__name__: f for f in (exact_match, gsm8k, arithmetic)}

# A minus sign counts only where no number or closing bracket stands before it: 5-3 is 5 and 3.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?\d[\d,]*(?:\.\d+)?", re.ASCII)


def final_number(text: str) -> Decimal | None:
    """The final number of a GSM8K-style solution (see `gsm8k`), or None."""
    _, mark, tail = text.rpartition("####")
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal(numbers[0 if mark else -1].replace(",", "").replace("$", ""))


def reference_number(answer: str) -> Decimal:
    """The final number of a reference answer; ValueError where it has none."""
    if (number := final_number(answer)) is None:
        raise ValueError(f"the reference answer {answer[-80:]!r} holds no number")
    return number


ARGUMENTS = {
    "ours": frozenset({"prompts", "completions", "answers"}),
    "trl": frozenset({"prompts", "completions", "completion_ids"}),
}
"""Signature -> the lists that every function of that signature is given."""


class RewardError(ValueError):
    """A reward function that cannot be found or gave no usable score; names it and the sample."""


@dataclass(frozen=True)
class RewardFunction:
    """One term of the reward: its name in the recipe, and its factor in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    signature: RewardSignature = "ours"
    answer_field: str = "answer"
    """The name of the answer among the columns of signature trl."""

    def columns(self, fields: frozenset[str]) -> frozenset[str]:
        """The names of its arguments, where the data has these further fields."""
        answer = {self.answer_field} if self.signature == "trl" else set()
        return ARGUMENTS[self.signature] | fields | answer

    def arguments(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        token_ids: Sequence[Sequence[int]],
    ) -> dict[str, list[Any]]:
        """What the function is called with, by name; copies, so that it may change them."""
        names = sorted({name for example in examples for name in example.extra})
        columns: dict[str, list[Any]] = {
            name: [copy.deepcopy(example.extra.get(name)) for example in examples] for name in names
        }
        answers = [example.answer for example in examples]
        prompts: list[Any] = [example.prompt for example in examples]
        answered: list[Any] = list(completions)
        if self.signature == "ours":
            return {"prompts": prompts, "completions": answered, "answers": answers} | columns
        for index, messages in enumerate(example.messages for example in examples):
            if messages is not None:
                prompts[index] = [copy.deepcopy(dict(message)) for message in messages]
                answered[index] = [{"role": "assistant", "content": completions[index]}]
        ids = [list(part) for part in token_ids]
        given = {"prompts": prompts, "completions": answered, "completion_ids": ids}
        return given | columns | {self.answer_field: answers}

    def place_of(self, error: BaseException) -> str:
        """`, at FILE, line N` of what the user wrote, where the function raised; else ""."""
        if self.name in BUILT_IN:
            return ""
        named = self.name.partition(":")[0], getattr(self.function, "__module__", None)
        return _place(error, *(module for module in named if isinstance(module, str)))


def resolve(name: str) -> Callable[..., Any]:
    """The reward function of that name: built in, or `package.module:function`."""
    if ":" not in name:
        if name in BUILT_IN:
            return BUILT_IN[name]
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = f"Built in are {', '.join(BUILT_IN)}; your own is named package.module:function"
        raise RewardError(f"unknown reward function {name!r}: {hint}{known}")
    module_name, _, attribute = name.partition(":")
    try:
        with interrupts_heard(), torch.set_grad_enabled(torch.is_grad_enabled()):
            module = importlib.import_module(module_name)
            function = getattr(module, attribute, None)
    except BaseException as error:  # the module is others' code, as in _call
        if not isinstance(error, KeyboardInterrupt):
            problem = f"reward function {name!r}: cannot import {module_name!r}: {one_line(error)}"
            problem += _place(error, module_name)
            missing = isinstance(error, ImportError)
            remedy = "; install it or put its folder on PYTHONPATH" if missing else ""
            raise RewardError(problem + remedy) from error
        raise
    if not callable(function):
        raise RewardError(f"reward function {name!r}: {module_name} has no function {attribute!r}")
    return function


def fitting_rewards(config: RunConfig, *sets: PromptSet | None) -> list[RewardFunction]:
    """The reward functions of a recipe; RewardError where one cannot be found or does not fit the
    data of the sets (see `check_data`)."""
    answer = config.data.answer_field
    functions = [
        RewardFunction(term.name, resolve(term.name), term.weight, term.signature, answer)
        for term in config.reward.functions
    ]
    for prompts in filter(None, sets):
        check_data(functions, prompts.examples)
    return functions


def check_data(functions: Sequence[RewardFunction], examples: Sequence[Example]) -> None:
    """RewardError where the fields of the data are not those that the functions take, or an answer
    holds no number for `gsm8k`.

    A batch hands over the fields of its examples, so a function has to take all fields of the data
    and may demand only those of every example.
    """
    names = [frozenset(example.extra) for example in examples]
    everywhere, anywhere = frozenset.intersection(*names), frozenset.union(*names)
    for term in functions:
        if taken := sorted(anywhere & term.columns(frozenset())):
            problem = "has the name of an argument that every reward function takes"
            raise RewardError(f"the data field {', '.join(taken)} {problem}: rename it in the data")
        for example in examples if term.function is gsm8k else ():
            try:
                reference_number(example.answer)
            except ValueError as error:
                raise RewardError(f"{example.place}: {error}: reward function gsm8k") from error
        try:
            signature = inspect.signature(term.function)
        except ValueError:
            continue  # written in C: its first call tells
        for fields in (everywhere, anywhere):
            try:
                signature.bind(**dict.fromkeys(term.columns(fields)))
            except TypeError as error:
                common, own = (", ".join(sorted(s)) for s in (term.columns(frozenset()), fields))
                raise RewardError(
                    f"reward function {term.name!r} does not fit the data: {error}; signature "
                    f"{term.signature} gives {common}, and beside prompt and answer the data has "
                    f"the fields {own or 'none'} (take others with **extra)"
                ) from error


def _place(error: BaseException, *modules: str) -> str:
    """The innermost line of these modules' packages."""
    packages = {module.partition(".")[0] for module in modules}
    for frame, number in reversed(list(walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
            return f", at {frame.f_code.co_filename}, line {number}"
    return ""
