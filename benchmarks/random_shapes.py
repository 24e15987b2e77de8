"""Shapes that no table was tuned for, drawn by a seed: the same seed gives the same shapes.

Widths are those of models people train: hidden sizes of 576 to 8192, intermediate sizes up to 29k,
keys and values of 128 to 2048 columns, vocabularies of 32k to 256k. Most are multiples of 64, some
only of 16. A weight of `shapes.WEIGHTS` or `shapes.FOLDS` is drawn again, whatever its direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.shapes import FOLDS, WEIGHTS

HIDDEN, INTERMEDIATE = (576, 8192), (1536, 29696)
KEYS_VALUES, VOCABULARIES = (128, 2048), (32768, 262144)
ROWS, TOKENS = (1, 16384), (256, 32768)
HEAD_ROWS = 2048
"""The most rows of a product with an LM head: a rollout or a chunk of a loss has no more."""

Sizes = dict[str, Any]
"""A shape as a case takes it."""

BYTES, OPERATIONS = 2 << 30, 4e12
"""The most that a product's operands and result take, and its multiplications and additions."""

TUNED = frozenset(
    weight for n, k in (*WEIGHTS, *(fold[1:] for fold in FOLDS)) for weight in ((n, k), (k, n))
)
"""Weights whose schedules were measured."""


def draw_products(seed: int, count: int, rows: tuple[int, int] = ROWS) -> list[Sizes]:
    """`count` different products: layout "nt" or "nn", m within `rows`, n and k."""

    def shape(rng: Random) -> Sizes | None:
        layout, head, weight = rng.choice(("nt", "nn")), *_weight(rng)
        n, k = weight if layout == "nt" else weight[::-1]
        m = _rows(rng, *rows)
        if (head and m > HEAD_ROWS) or not _within(2 * (m * k + n * k + m * n), 2.0 * m * n * k):
            return None
        return {"layout": layout, "m": m, "n": n, "k": k}

    return _different(Random(f"products {seed}"), count, shape)


def draw_folds(seed: int, count: int) -> list[Sizes]:
    """`count` different gradient folds: tokens, n and k."""

    def shape(rng: Random) -> Sizes | None:
        (_, (n, k)), tokens = _weight(rng), _rows(rng, *TOKENS)
        if not _within(2 * tokens * (n + k) + 4 * n * k, 2.0 * tokens * n * k):
            return None
        return {"tokens": tokens, "n": n, "k": k}

    return _different(Random(f"folds {seed}"), count, shape)


def _different(rng: Random, count: int, draw: Callable[[Random], Sizes | None]) -> list[Sizes]:
    """`count` different shapes; `draw` gives None for one that is too large."""

    found: dict[tuple[tuple[str, Any], ...], Sizes] = {}
    while len(found) < count:
        if shape := draw(rng):
            found[tuple(shape.items())] = shape
    return list(found.values())


def _within(held: int, operations: float) -> bool:
    return held <= BYTES and operations <= OPERATIONS


def _weight(rng: Random) -> tuple[bool, tuple[int, int]]:
    """Whether it is an LM head, and the weight's output and input features."""
    while True:
        hidden = _width(rng, *HIDDEN)
        kinds = ("query", "output", "key", "up", "down", "head")
        (kind,) = rng.choices(kinds, weights=(2, 2, 2, 3, 3, 1))
        if kind in ("query", "output"):
            other = rng.choice((hidden, _width(rng, *HIDDEN)))
        elif kind == "key":
            other = _width(rng, *KEYS_VALUES)
        elif kind == "head":
            other = _width(rng, *VOCABULARIES)
        else:
            # Gated units are 2 to 5 times as wide as the hidden states.
            other = _multiple(hidden * rng.uniform(2, 5), 64, *INTERMEDIATE)
        weight = (hidden, other) if kind in ("output", "down") else (other, hidden)
        if weight not in TUNED:
            return kind == "head", weight


def _width(rng: Random, low: int, high: int) -> int:
    """A multiple of 64, one time in eight of 16 only, evenly spread on a log scale."""
    return _multiple(_log_uniform(rng, low, high), 16 if rng.random() < 1 / 8 else 64, low, high)


def _multiple(value: float, step: int, low: int, high: int) -> int:
    return min(max(round(value / step) * step, low), high)


def _rows(rng: Random, low: int, high: int) -> int:
    """Rows or tokens, evenly spread on a log scale: any number, a round one such as 700, or a power
    of two."""
    value = _log_uniform(rng, low, high)
    style = rng.choice(("any", "round", "power"))
    if style == "round":
        value = round(value, 1 - math.floor(math.log10(value)))
    elif style == "power":
        value = 2 ** round(math.log2(value))
    return min(max(round(value), low), high)


def _log_uniform(rng: Random, low: int, high: int) -> float:
    return low * (high / low) ** rng.random()
