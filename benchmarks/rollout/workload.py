"""What the rollout benches ask of an engine.

Prompts and lengths are functions of fixed seeds, so that every way of generating gets the same
work. Every run of a workload draws fresh prompts: no cache may know them from the run before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from rl_consistency.rollout.sampling_params import SamplingParams

MEDIAN_SHARE, SPREAD = 0.35, 0.6
"""Lognormal lengths: their median as a share of the longest, and the deviation of their log."""

TOKENS_BEYOND = 8
"""Cache slots kept free behind each sequence: a step in flight, or a draft."""


@dataclass(frozen=True)
class Workload:
    """Groups of completions that share a prompt.

    Example: Workload(groups=32, group_size=8, prompt_len=512, longest=1024) is a GRPO batch of 256
    sequences whose 32 to 1024 new tokens average about 420.
    """

    groups: int
    group_size: int
    prompt_len: int
    longest: int
    """Most new tokens of a sequence."""
    shortest: int = 32
    """Fewest new tokens; all sequences are as long where it equals `longest`."""

    @classmethod
    def equal(cls, groups: int, group_size: int, prompt_len: int, new_tokens: int) -> Workload:
        """A workload whose sequences are all as long."""
        return cls(groups, group_size, prompt_len, longest=new_tokens, shortest=new_tokens)

    @property
    def sequences(self) -> int:
        return self.groups * self.group_size

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the workload, as a row's shape names them."""
        return {
            "sequences": self.sequences,
            "group": self.group_size,
            "prompt": self.prompt_len,
            "new_tokens": self.longest,
        }

    def lengths(self) -> list[int]:
        """New tokens of each sequence: lognormal, clipped to [shortest, longest]."""
        draw = random.Random(0)
        middle = math.log(max(MEDIAN_SHARE * self.longest, 1.0))
        return [
            min(max(round(draw.lognormvariate(middle, SPREAD)), self.shortest), self.longest)
            for _ in range(self.sequences)
        ]

    def prompts(self, run: str, vocabulary: int) -> list[list[int]]:
        """One prompt per sequence, equal within a group; other ones for every `run`."""
        draw, length = random.Random(f"0 {run}"), self.prompt_len
        distinct = [draw.choices(range(vocabulary), k=length) for _ in range(self.groups)]
        return [distinct[i // self.group_size] for i in range(self.sequences)]

    def requests(self) -> list[SamplingParams]:
        """Sampling parameters of each sequence: so many tokens, whatever they are."""
        return [SamplingParams(max_tokens=n, ignore_eos=True) for n in self.lengths()]

    def kv_blocks(self, block_size: int) -> int:
        """Cache blocks with room for every sequence at its full length, nothing shared."""
        return sum(-(-(self.prompt_len + n + TOKENS_BEYOND) // block_size) for n in self.lengths())
