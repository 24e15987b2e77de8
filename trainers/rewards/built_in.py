"""The reward functions that a recipe names without a module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

Texts = Sequence[str]


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
        scores.append(float(final_number(completion) == reference_number(answer)))
    return scores


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
