"""The reward functions of a recipe, and the rewards of a batch: each function is called once, and
what it returned is checked."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from rl_consistency.trainers.config.data_sections import (
    Per,
    RewardFunctionSection,
    RewardSignature,
)
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.data.foreign_files import one_line, shown
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.foreign_calls import (
    LeftChanged,
    TimeIsUp,
    finished,
    guarded,
    time_limit,
)
from rl_consistency.trainers.interrupts import interrupts_heard
from rl_consistency.trainers.reward_calls import (
    ARGUMENTS,
    OF_ONE,
    all_scores,
    named_arguments,
    of_verl,
    score_of,
    source_digest,
    takes_ids,
    takes_one,
)
from rl_consistency.trainers.reward_files import module_name
from rl_consistency.trainers.reward_functions import (
    BUILT_IN,
    RewardError,
    gsm8k,
    place_in,
    reference_number,
    resolve,
)


@dataclass(frozen=True)
class RewardFunction:
    """One term of the reward: its name in the recipe, and its factor in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    signature: RewardSignature = "ours"
    answer_field: str | None = "answer"
    """The name of the answer among the columns of signature trl; None where there is none."""
    per: Per = "batch"
    """Of signature ours, whether it is called with lists or with one completion at a time."""
    digest: str | None = None
    """Of what decides on its scores, where that is no module's file."""

    def columns(self, fields: frozenset[str]) -> frozenset[str]:
        """The names of its arguments, where the data has these further fields."""
        if self.signature == "verl":
            return ARGUMENTS["verl"]
        further = {"completion_ids"} if takes_ids(self.function) else set[str]()
        if self.signature == "trl":
            further = {self.answer_field} if self.answer_field else set()
        if self.per == "batch":
            return ARGUMENTS[self.signature] | fields | further
        ones = {OF_ONE[name] for name in ARGUMENTS["ours"]}
        return named_arguments(ones | fields | further, self.function)

    @property
    def reserved(self) -> frozenset[str]:
        """Names that no field of the data may have."""
        if self.signature == "verl":
            return ARGUMENTS["ours"]  # the lists that its arguments are taken from
        return self.columns(frozenset()) | (ARGUMENTS["ours"] if self.per == "sample" else set())

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
        answers: list[Any] = [example.answer for example in examples]
        if self.signature != "ours":  # functions of TRL and verl know the values of rows
            answers = [e.answer if e.number is None else e.number for e in examples]
        prompts: list[Any] = [example.prompt for example in examples]
        answered: list[Any] = list(completions)
        ids = [list(part) for part in token_ids]
        if self.signature != "trl":
            given = {"prompts": prompts, "completions": answered, "answers": answers} | columns
            return given | ({"completion_ids": ids} if takes_ids(self.function) else {})
        for index, messages in enumerate(example.messages for example in examples):
            if messages is not None:
                prompts[index] = [copy.deepcopy(dict(message)) for message in messages]
                answered[index] = [{"role": "assistant", "content": completions[index]}]
        given = {"prompts": prompts, "completions": answered, "completion_ids": ids}
        return given | columns | ({self.answer_field: answers} if self.answer_field else {})

    def __call__(self, given: Mapping[str, list[Any]]) -> Any:
        """What the function returns for the lists of `arguments`; of one that is called with one
        completion at a time a list, to be awaited where the function is async."""
        if self.per == "batch" and self.signature != "verl":
            return self.function(**given)
        each = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
        if self.signature == "verl":
            found = [self.function(**of_verl(one)) for one in each]
        else:
            ones = [{OF_ONE.get(name, name): one[name] for name in one} for one in each]
            names = named_arguments(set(ones[0]) if ones else set(), self.function)
            found = [self.function(**{name: one[name] for name in names}) for one in ones]
        if any(map(inspect.isawaitable, found)):
            return all_scores(found)
        return [score_of(value) for value in found]

    def place_of(self, error: BaseException) -> str:
        """`, at FILE, line N` of what the user wrote, where the function raised; else ""."""
        if self.name in BUILT_IN:
            return ""
        named = module_name(self.name), getattr(self.function, "__module__", None)
        return place_in(error, *(module for module in named if isinstance(module, str)))


def _term(
    config: RunConfig,
    section: RewardFunctionSection,
    given: Mapping[str, Callable[..., Any]],
    found: Mapping[str, Callable[..., Any]],
) -> RewardFunction:
    """One term of the reward; `given` are functions by the names that they have in the recipe, and
    `found` those that `look_up` has read by name."""
    name, answer, digest = section.key, config.data.answer_field, None
    if section.model is not None:
        from rl_consistency.trainers.reward_model import RewardModel

        model = RewardModel(section.model, config.run.device)
        return RewardFunction(name, model, section.weight, "trl", answer, digest=model.digest)
    if name in given:
        function = given[name]
        digest = source_digest(function)
    else:
        function = found[name] if name in found else resolve(name, config.reward.folder)
        if answer is None and name in BUILT_IN:
            problem = "compares with answers, and data.answer_field is null"
            raise RewardError(f"reward function {name} {problem}: give a function of your own")
    per = section.per or ("sample" if takes_one(function) else "batch")
    return RewardFunction(name, function, section.weight, section.signature, answer, per, digest)


def fitting_rewards(
    config: RunConfig,
    *sets: PromptSet,
    given: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    found: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> list[RewardFunction]:
    """The reward functions of a recipe, of which some are `given`, not named; RewardError where one
    cannot be found or does not fit the data of the sets (see `check_data`)."""
    functions = [_term(config, one, given, found) for one in config.reward.functions]
    for prompts in sets:
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
        if taken := sorted(anywhere & term.reserved):
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


LARGEST = (2 - 2**-23) * 2.0**127
"""Largest number of float32, in which advantages are."""


@dataclass(frozen=True)
class Rewards:
    """The rewards of a batch of completions, unweighted by function name and in all."""

    total: list[float]
    """Weighted sum per completion, added in the order of the functions; NaN where none applied."""
    by_function: dict[str, list[float | None]]
    """None where a function did not apply."""

    def taken(self, samples: Sequence[int]) -> Rewards:
        """Those of these completions, in this order."""
        found = {name: [each[i] for i in samples] for name, each in self.by_function.items()}
        return Rewards([self.total[i] for i in samples], found)

    def followed_by(self, other: Rewards) -> Rewards:
        """These, and those of further completions."""
        found = {name: each + other.by_function[name] for name, each in self.by_function.items()}
        return Rewards(self.total + other.total, found)


def compute_rewards(
    functions: Sequence[RewardFunction],
    examples: Sequence[Example],
    completions: Sequence[str],
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    timeout: float | None = None,
) -> Rewards:
    """The rewards of `completions`; the i-th answers `examples[i]`.

    `token_ids` are those of the completions, special tokens included. `timeout` is in seconds, of
    one call of a function.

    A function may be `async`; functions are called one after another. Where one returns None it
    does not apply, and the others are added. A completion to which none applies is warned of.

    RewardError, naming function and sample, when a function raises, takes too long, or does not
    return None or a finite number within float32 for each completion.
    """
    batch = _Batch(examples, completions, token_ids or [[]] * len(examples), timeout)
    total = [0.0] * len(completions)
    by_function: dict[str, list[float | None]] = {}
    for term in functions:
        scores = _scores(term, batch)
        by_function[term.name] = scores
        pairs = zip(total, scores, strict=True)
        total = [sum_ if score is None else sum_ + term.weight * score for sum_, score in pairs]
    columns = zip(*by_function.values(), strict=True)
    none = [i for i, scores in enumerate(columns) if all(score is None for score in scores)]
    if none:
        warnings.warn(
            f"all reward functions returned None for {batch.sample(none[0])} ({len(none)} such "
            "completions): it has no reward, and its advantage is 0",
            stacklevel=2,
        )
    if wrong := [i for i, value in enumerate(total) if not abs(value) <= LARGEST]:
        value, sample = total[wrong[0]], batch.sample(wrong[0])
        raise RewardError(f"the weighted rewards add up to {value} for {sample}")
    total = [nan if i in none else value for i, value in enumerate(total)]
    return Rewards(total, by_function)


def known(scores: Sequence[float | None]) -> list[float]:
    """The scores of those that have one."""
    return [score for score in scores if score is not None and not isnan(score)]


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


def _scores(term: RewardFunction, batch: _Batch) -> list[float | None]:
    scores, error = _call(term, batch)
    count = len(batch.completions)
    given = scores if type(scores) is list else []
    numbers = [None if score is None else _number(score) for score in given]
    if isinstance(error, TimeIsUp):
        limit = f"{batch.timeout:g} s for {count} completions (reward.timeout)"
        problem = f"took longer than {limit}{term.place_of(error)}: raise it or give up earlier"
    elif isinstance(error, LeftChanged):
        problem = str(error)
    elif error is not None:
        problem = f"raised {one_line(error)} ({_failing_sample(term, batch)}){term.place_of(error)}"
    elif type(scores) is not list:
        shape = f" of shape {tuple(scores.shape)}" if _is_array(scores) else ""
        needed = "a list, a NumPy array or a tensor with one number per completion"
        problem = f"returned {type(scores).__name__}{shape}: it must return {needed}"
    elif len(scores) != count:
        first = f"sample {min(len(scores), count)} is the first unmatched one"
        problem = f"returned {len(scores)} scores for {count} completions: {first}"
    elif wrong := [i for i, n in enumerate(numbers) if n is not None and not abs(n) <= LARGEST]:
        value, sample = shown(scores[wrong[0]]), batch.sample(wrong[0])
        problem = f"returned {value:.60}, not a finite float32 or None, for {sample}"
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
        with interrupts_heard(), time_limit(batch.timeout), guarded():
            scores = finished(term(given))
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
