"""One request's state: a prompt and one sample growing behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from rl_consistency.rollout.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RolloutSequence:
    """A sample under way.

    Of `token_ids` (prompt, then generated) the first `num_computed_tokens` have their keys and
    values in the cache. In decoding exactly one token is not computed yet: the last one. Losing the
    cache blocks sets the count back to 0 and touches neither tokens nor logprobs.
    """

    prompt_index: int
    sample_index: int
    prompt_id: int
    """Keys the random stream, with the seed, the sample index and the position."""
    params: SamplingParams
    stop_token_ids: frozenset[int]
    """All tokens that end this sample: its own stop tokens and, unless ignored, eos."""
    token_ids: list[int]
    """Constructed with the prompt; generated tokens are appended."""
    num_prompt_tokens: int = field(init=False)
    token_logprobs: list[float] = field(default_factory=list)
    """One fp32 value for each generated token."""
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    """Physical block ids in logical order."""
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    """Leading full blocks the block manager has seen computed."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that will ever need a cache slot; the last sampled token needs none."""
        return self.num_prompt_tokens + self.params.max_tokens - 1

    def append(self, token_id: int, logprob: float) -> None:
        """Add a sampled token; a stop token is kept and ends the sample, as does the last slot."""
        self.token_ids.append(token_id)
        self.token_logprobs.append(logprob)
        if token_id in self.stop_token_ids:
            self._finish("stop")
        elif self.num_generated_tokens == self.params.max_tokens:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
