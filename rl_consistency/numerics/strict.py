"""The one knob: which ops run in their canonical order and which on their stock path.

Everything is canonical unless a `strict(...)` block or the environment variable
`RL_CONSISTENCY_STRICT` says otherwise. The variable is read here and nowhere else, once, when the
first op asks: `1` (all canonical, the default), `0` (all stock), or `-attention,-linear` (all but
these).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

ROUTED = ("router", "experts")
"""Ops of mixture-of-experts models alone."""

OPS = (
    *("linear", "rms_norm", "rotary", "glu", "embedding", "attention", *ROUTED),
    "token_logprobs",
)
"""Ops that have a stock path to switch to."""

VARIABLE = "RL_CONSISTENCY_STRICT"


@dataclass(frozen=True)
class Strictness:
    """Which ops are on their stock path; all others are canonical."""

    stock: frozenset[str] = frozenset()

    def as_record(self) -> dict[str, object]:
        """What a run saves beside its results."""
        return {"strict": not self.stock, "stock_ops": sorted(self.stock)}


_current: ContextVar[Strictness | None] = ContextVar("strictness", default=None)


@contextmanager
def strict(enabled: bool = True, *, except_: Iterable[str] = ()) -> Iterator[Strictness]:
    """Choose canonical or stock paths inside a block; nests, and restores on any exit.

    It holds in this thread. One that is started inside begins with the environment's choice: open
    the block there, or start it by `contextvars.copy_context().run`. A layer that gradient
    checkpointing computes again has the choice of its first time.

    Args:
        enabled: True runs every op in its canonical order, False on its stock path; else TypeError.
        except_: ops that do the opposite, for ablations: `strict(except_={"attention"})`.
            ValueError on an unknown name.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled is {enabled!r}; give True or False.")
    exceptions = _known(except_)
    stock = exceptions if enabled else frozenset(OPS) - exceptions
    with held(Strictness(stock)) as choice:
        yield choice


@contextmanager
def held(choice: Strictness) -> Iterator[Strictness]:
    """Put a choice in force inside a block."""
    token = _current.set(choice)
    try:
        yield choice
    finally:
        _current.reset(token)


def current() -> Strictness:
    """The choice in force: the innermost `strict` block, else the environment."""
    return _current.get() or _from_environment()


def is_canonical(op: str) -> bool:
    """Whether `op` runs in its canonical order here."""
    return op not in current().stock


@cache
def _from_environment() -> Strictness:
    text = os.environ.get(VARIABLE, "1").strip()
    if text in ("1", "0"):
        return Strictness(frozenset() if text == "1" else frozenset(OPS))
    names = [part.strip() for part in text.split(",")]
    if not all(name.startswith("-") for name in names):
        raise ValueError(
            f"{VARIABLE}={text!r}; allowed: 1, 0, or ops to leave out such as -attention,-linear."
        )
    return Strictness(_known(name[1:] for name in names))


def _known(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise ValueError(f"except_={names!r}; give a set of names, such as {{{names!r}}}.")
    chosen = frozenset(names)
    unknown = sorted(chosen - set(OPS))
    if unknown:
        raise ValueError(f"unknown op {', '.join(map(repr, unknown))}; known: {', '.join(OPS)}.")
    return chosen
