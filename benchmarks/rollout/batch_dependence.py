"""Whether a sequence's logprobs depend on the sequences that run beside it."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from benchmarks.rollout.engine_child import Pairs


@dataclass(frozen=True)
class Independence:
    """Prompts alone, then among others, greedily: how many logprobs the others change."""

    prompts: int = 16
    others: int = 240
    new_tokens: int = 64
    longest_prompt: int = 512

    def batches(self, vocabulary: int) -> tuple[list[list[int]], list[list[int]], int]:
        """The prompts alone, the batch with the others, and where the prompts begin in it."""
        draw = random.Random("batch dependence")

        def drawn(count: int, least: int, most: int) -> list[list[int]]:
            return [
                draw.choices(range(vocabulary), k=draw.randint(least, most)) for _ in range(count)
            ]

        longest = self.longest_prompt
        alone = drawn(self.prompts, longest // 8, longest // 2)
        others = drawn(self.others, longest // 32, longest)
        start = self.others * 2 // 5
        return alone, [*others[:start], *alone, *others[start:]], start


def differing_share(one: Pairs, other: Pairs) -> float:
    """Share of logprobs with other bits, of those up to and with each sequence's first token that
    differs: what follows it has another past."""
    compared = differing = 0
    for (tokens, logprobs), (tokens_2, logprobs_2) in zip(one, other, strict=True):
        for a, b, x, y in zip(tokens, tokens_2, logprobs, logprobs_2, strict=True):
            compared += 1
            differing += a != b or struct.pack("<f", x) != struct.pack("<f", y)
            if a != b:
                break
    return differing / compared
