"""One sample's state: a prompt and the tokens growing behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from rl_consistency.rollout.drafter import Speculator
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.stop_strings import StopStrings

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True, eq=False)
class RolloutSequence:
    """A sample under way.

    The engine runs one step ahead of what it knows: of the `num_scheduled_tokens` tokens,
    `token_ids` lacks the last `num_pending`, which are not reported yet. The steps launched so far
    write the keys and values of the first `num_computed_tokens`: in decoding, of all but the last.

    Each field has one writer: `Requests` those up to `speculator`, `append` and `finish` the
    tokens, logprobs and the end, `BlockManager` the last three, and `Scheduler` those between. It
    also takes speculator and end from a sequence that starts over.
    """

    prompt_index: int
    sample_index: int
    prompt_id: int  # keys the random stream, with the seed, the sample index and the position
    params: SamplingParams
    stop_token_ids: frozenset[int]  # its own stop tokens and, unless ignored, eos
    token_ids: list[int]  # the prompt, then the reported tokens
    request_id: str = ""
    stop_strings: StopStrings | None = None
    speculator: Speculator | None = None  # drafts for this sample; None decodes plainly
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Length at which the sample ends by length; `Requests` keeps it within the context."""
    token_logprobs: list[float] = field(default_factory=list)
    """One fp32 value for each generated token."""
    token_routing: list[int] = field(default_factory=list)
    """One `expert_fingerprints` for each generated token; empty in a dense model."""
    finish_reason: FinishReason | None = None
    error: str | None = None  # what went wrong, where `finish_reason` is "error"
    submitted_at: float = 0.0  # `perf_counter` seconds
    arrival: int = 0
    slot: int | None = None  # row of the runner's device state; None unless the sequence runs
    preempted: bool = False
    """Whether it ever gave its blocks back or started over; it then waits before all others."""
    num_computed_tokens: int = 0
    num_pending: int = 0
    """0 or 1 when a step is scheduled. A draft under way counts as 1, however much of it holds."""
    num_drafted: int = 0
    """Length of the draft under way; its sequence is not scheduled again before the report."""
    alone: bool = False
    """Whether it takes no block that another computed, and gives none."""
    num_void: int = 0  # steps under way for it whose reports are void
    block_table: list[int] = field(default_factory=list)  # physical block ids in logical order
    num_published_blocks: int = 0  # leading full blocks the block manager may share
    num_borrowed_blocks: int = 0  # leading blocks it found computed when it was last admitted

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.params.max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.token_ids)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that exist, the pending one included: steps and blocks are planned with these."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int, logprob: float, *routing: int) -> None:
        """Add a sampled token and end the sample if the token ends it: the truncation rule.

        A stop token, or one that completes a stop string, belongs to the sample and ends it with
        "stop"; else the last place ends it with "length". A logprob that is not finite ends it with
        "error", and the token is dropped.
        """
        if not math.isfinite(logprob):
            where = f"prompt {self.prompt_index}, sample {self.sample_index}, position"
            text = "the model gave a logprob that is not finite; look for NaN or infinity in its"
            text += " weights (a diverged update, or fp16 overflow)"
            return self.finish("error", f"{where} {self.num_tokens}: {text}")
        self.token_ids.append(token_id)
        self.token_logprobs.append(logprob)
        self.token_routing.extend(routing)
        if token_id in self.stop_token_ids or (
            self.stop_strings is not None and self.stop_strings.append(token_id)
        ):
            self.finish("stop")
        elif len(self.token_ids) == self.max_num_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the sample; what is still under way for it will be discarded."""
        self.finish_reason, self.error = reason, error
