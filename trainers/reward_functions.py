"""The reward functions that come with the package, and those that a recipe names."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from traceback import walk_tb
from typing import Any

from rl_consistency.trainers.config.data_sections import BUILT_IN as NAMES
from rl_consistency.trainers.data.foreign_files import one_line
from rl_consistency.trainers.foreign_calls import guarded
from rl_consistency.trainers.interrupts import interrupts_heard
from rl_consistency.trainers.reward_files import FILE, load_file, module_name

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


BUILT_IN = dict(zip(NAMES, (exact_match, gsm8k, arithmetic), strict=True))

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


class RewardError(ValueError):
    """A reward function that cannot be found or gave no usable score; names it and the sample."""


def resolve(name: str, folder: Path | None = None) -> Callable[..., Any]:
    """The reward function of that name: built in, `package.module:function`, or `file.py:function`
    with a file relative to `folder` or, if it is not there, to the working directory."""
    if ":" not in name:
        if name in BUILT_IN:
            return BUILT_IN[name]
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = f"Built in are {', '.join(BUILT_IN)}; your own is named package.module:function"
        known += " or file.py:function"
        raise RewardError(f"unknown reward function {name!r}: {hint}{known}")
    source, _, attribute = name.rpartition(":")
    try:
        with interrupts_heard(), guarded():
            if FILE.fullmatch(name):
                module = load_file(name, [*([folder] if folder else []), Path.cwd()])
            else:
                module = importlib.import_module(source)
            function = getattr(module, attribute, None)
    except BaseException as error:  # the module is others' code, as in _call
        if not isinstance(error, KeyboardInterrupt):
            problem = f"reward function {name!r}: cannot import {source!r}: {one_line(error)}"
            problem += place_in(error, module_name(name))
            missing = isinstance(error, ImportError) and not FILE.fullmatch(name)
            remedy = "; install it or put its folder on PYTHONPATH" if missing else ""
            raise RewardError(problem + remedy) from error
        raise
    if not callable(function):
        raise RewardError(f"reward function {name!r}: {source} has no function {attribute!r}")
    return function


def place_in(error: BaseException, *modules: str) -> str:
    """`, at FILE, line N`: the innermost line of these modules' packages; "" if there is none."""
    packages = {module.partition(".")[0] for module in modules}
    for frame, number in reversed(list(walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
            return f", at {frame.f_code.co_filename}, line {number}"
    return ""
