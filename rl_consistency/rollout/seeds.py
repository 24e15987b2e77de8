"""The seeds of an engine's calls: drawn where none is given, and whether a given one repeats."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_consistency.rollout.sampling_params import SamplingParams, check_integer
from rl_consistency.rollout.sequence import RolloutSequence

MOST_KEPT = 1 << 14
"""Prompts with a given seed that are remembered, about 4 MB; the oldest are forgotten."""

_REPEATED = (
    "seed {} and prompt id {} were used before, under other weights: this rollout draws the same "
    "random numbers as that one. In a training loop leave `seed` out of SamplingParams: each call "
    "then draws its own, and Completion.seed reports it. Where the same numbers are wanted, as in "
    "an evaluation, nothing is wrong. The engine says so once."
)


class Seeds:
    """A stream of seeds, one for each call that samples without a given one.

    Seed k is the first 63 bits of BLAKE2b over (the stream's seed, the rank of this process in
    torch.distributed or 0, k). So ranks draw different noise from equal seeds, and no global random
    state is read or changed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = check_integer("seed", seed, 0, 2**64 - 1)
        self._num_drawn = 0
        self._given: dict[tuple[int, int], str] | None = {}
        """Digest of the weights that each (seed, prompt id) drew with; None once that was said."""

    def resolved(self, asked: Iterable[SamplingParams]) -> list[SamplingParams]:
        """Copies of the params, with the next seed of the stream where they have none."""
        drawn = self._next()
        return [
            replace(params, seed=drawn if params.seed is None else params.seed) for params in asked
        ]

    def take(self, samples: Sequence[RolloutSequence], digest: str) -> None:
        """Count a call in: its samples, all resolved together, and the digest of the weights.

        The stream moves on if one of them draws from it. UserWarning, once, where given seeds
        repeat random numbers under other weights.
        """
        drawn, drawing = self._next(), [s for s in samples if s.params.temperature > 0]
        self._num_drawn += any(s.params.seed == drawn for s in drawing)
        for sample in drawing:
            if self._given is None:
                return
            assert sample.params.seed is not None
            if sample.sample_index or sample.params.seed == drawn:
                continue
            key = sample.params.seed, sample.prompt_id
            if self._given.setdefault(key, digest) != digest:
                self._given = None
                # Behind submit, stream and generate.
                warnings.warn(_REPEATED.format(*key), stacklevel=5)
            elif len(self._given) > MOST_KEPT:
                del self._given[next(iter(self._given))]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "num_drawn": self._num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the engine that gave the state; ValueError for anything else."""
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise ValueError(f"the engine's state is {{'seed': ., 'num_drawn': .}}; got {state!r}")
        limits = {"seed": 2**64 - 1, "num_drawn": None}
        found = [check_integer(name, state[name], 0, high) for name, high in limits.items()]
        self._seed, self._num_drawn = found

    def _next(self) -> int:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if there else 0
        text = f"{self._seed} {rank} {self._num_drawn}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
