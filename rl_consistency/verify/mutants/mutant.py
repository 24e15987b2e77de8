"""A negative control: a program that is wrong in one known way, and the checks that must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

PRESET = "tiny-qwen3"
"""Tied embeddings, GQA and qk-norm: every mutant of a dense model can show in it."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong program."""

    name: str
    what: str
    """What is wrong with it: the docstring of `perturb`."""
    perturb: Callable[[], AbstractContextManager[None]]
    caught_by: tuple[str, ...]
    """Keys of the checks that must turn red; of none where the program has no such part."""
    caught_on_cuda: tuple[str, ...] | None = None
    """Keys of the checks that must turn red on a GPU, where they differ; None: as `caught_by`."""
    preset: str = PRESET
    """The model whose checks must notice."""

    def keys(self, device: torch.device) -> tuple[str, ...]:
        differs = device.type == "cuda" and self.caught_on_cuda is not None
        return self.caught_on_cuda or () if differs else self.caught_by


def mutant(
    name: str,
    *keys: str,
    cuda: str | None = None,
    at: tuple[Any, ...] | None = None,
    preset: str = PRESET,
) -> Callable[[Callable[..., Any]], Mutant]:
    """Makes a mutant of a perturbation, whose docstring says what is wrong.

    Keys are `claim subject`; several subjects of one claim stand in one text, split by `; `. With
    `at`, what is decorated is a wrong function, and `bind(*place, wrong)` puts it in its place.
    """

    def decorate(wrong: Callable[..., Any]) -> Mutant:
        return Mutant(
            name=name,
            what=(wrong.__doc__ or "").rstrip("."),
            perturb=wrong if at is None else partial(*at, wrong),
            caught_by=_split(keys),
            caught_on_cuda=None if cuda is None else _split([cuda]),
            preset=preset,
        )

    return decorate


def _split(texts: Iterable[str]) -> tuple[str, ...]:
    split = [text.partition(" ") for text in texts]
    return tuple(f"{claim} {s}" for claim, _, subjects in split for s in subjects.split("; "))
