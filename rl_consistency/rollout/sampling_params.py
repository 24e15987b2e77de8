"""How the completions of one prompt are drawn."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from numbers import Real
from typing import Any, Literal

import numpy as np

from rl_consistency.rollout.drafter import MAX_DRAFT

MIN_TEMPERATURE = 1e-4
"""Smallest temperature other than 0: below it a scaled fp32 logit may overflow."""

_TEMPERATURES = f"be 0 (greedy) or at least {MIN_TEMPERATURE:g} and finite in fp32"
_MAX_TEMPERATURE = (2.0 - 2.0**-23) * 2.0**127  # the largest fp32 number: the sampler's dtype
_MIN_TOP_P = 2.0**-126  # the smallest normal fp32 number
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Truncation(IntEnum):
    """What is ruled out where tokens are sampled."""

    NONE = 0
    SUPPORT = 1  # tokens outside the support
    DRAW = 2  # the same for the draw, and nothing for a logprob


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the completions of one prompt are drawn.

        SamplingParams(n=8, temperature=1.0, top_p=0.95, max_tokens=256)

    draws eight samples of at most 256 tokens. Training recomputes the truncated support from it:
    `rl_consistency.token_logprobs(model, ..., sampling=params)`. A wrong value is a ValueError.
    """

    n: int = 1
    """Samples per prompt (the GRPO group size), at least 1."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy decoding, the lowest token id winning a tie."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. At most 2**31 - 1."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches it; in (0, 1], 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1], 0 drops none."""
    max_tokens: int = 16
    """Most tokens generated per sample, at least 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, as the engine's eos does; the stop token belongs to the sample."""
    seed: int | None = None
    """Seed of the random stream, in [0, 2**64): its random numbers are the same in each call. None:
    the engine gives each call a fresh one, and `Completion.seed` reports it."""
    ignore_eos: bool = False
    """Do not stop at the engine's eos tokens; `stop_token_ids` still stop."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample once its text holds one; the token that completes it is the last.
    They need an engine with a tokenizer. None may hold U+FFFD, which stands for broken bytes."""
    speculation: int = 0
    """Longest draft verified in one step, 0 to 7; 0 decodes plainly. It changes no token and no
    logprob, and saves time where text is copied and few sequences run."""
    greedy_logprobs: Literal["zero", "full"] = "zero"
    """Logprobs at temperature 0: "zero", as the token is certain, or "full", those of the softmax
    of the logits, as at temperature 1 without truncation. "full" needs temperature 0."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "n": check_integer("n", self.n, 1),
            "top_k": check_integer("top_k (0 is off)", self.top_k, 0, 2**31 - 1),
            "max_tokens": check_integer("max_tokens", self.max_tokens, 1),
            "seed": None if self.seed is None else check_integer("seed", self.seed, 0, 2**64 - 1),
            "speculation": check_integer("speculation", self.speculation, 0, MAX_DRAFT),
            "stop_token_ids": _token_ids(self.stop_token_ids),
            "stop": _strings(self.stop),
            "ignore_eos": bool(self.ignore_eos),
        }
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        for name, low, high, allowed in (
            ("temperature", MIN_TEMPERATURE, _MAX_TEMPERATURE, _TEMPERATURES),
            ("top_p", _MIN_TOP_P, 1.0, "lie in (0, 1] in fp32, 1 is off"),
            ("min_p", 0.0, 1.0, "lie in [0, 1], 0 is off"),
        ):
            values[name] = value = _real(name, getattr(self, name))
            if not (low <= value <= high or (value == 0.0 and name == "temperature")):
                raise ValueError(f"{name} must {allowed}; got {value!r}")
        if self.greedy_logprobs not in ("zero", "full"):
            raise ValueError(
                f'greedy_logprobs must be "zero" or "full", got {self.greedy_logprobs!r}'
            )
        if self.greedy_logprobs == "full" and values["temperature"] != 0:
            raise ValueError(
                f'greedy_logprobs="full" needs temperature 0, got {values["temperature"]!r}; above '
                "it a logprob is that of the distribution the token is drawn from"
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def restricts_support(self) -> bool:
        """Whether some tokens may be ruled out."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def truncation(self) -> Truncation:
        if self.greedy_logprobs == "full":
            return Truncation.DRAW
        return Truncation.SUPPORT if self.restricts_support else Truncation.NONE


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int, of whatever library; ValueError unless it is an integer, no less than
    `low` and no more than `high`."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}")
    return number


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # out of every range


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"stop_token_ids must be a sequence of integers >= 0, got {value!r}")
    return tuple(check_integer("each of stop_token_ids", token_id, 0) for token_id in value)


def _strings(value: Any) -> tuple[str, ...]:
    is_text = isinstance(value, (str, bytes)) or not isinstance(value, Iterable)
    strings: tuple[Any, ...] = ("",) if is_text else tuple(value)
    if not all(isinstance(s, str) and s and _REPLACEMENT not in s for s in strings):
        raise ValueError(
            f"stop must be a sequence of strings, none of them empty or with U+FFFD, got {value!r}"
        )
    return strings
