"""One sample's state: a prompt and the tokens growing behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rl_consistency.rollout.drafter import Speculator
from rl_consistency.rollout.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


LONGEST_READ = 16  # about the most tokens decoded again with a new one

_INCOMPLETE, _LONGEST_INCOMPLETE = "\N{REPLACEMENT CHARACTER}", 3
"""A decoder writes it for each byte, three at most, of a character whose last bytes are to come."""


class Detokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = ...) -> str: ...


class StopStrings:
    """Tells at which token the text of a sample first holds one of the strings.

    The text is that of the generated tokens, special tokens included. Each new token is decoded
    behind a few read before, because a decoder may write a token in another way at the beginning of
    a text. The text of `context`, tokens before the first, is not searched.
    """

    def __init__(
        self, tokenizer: Detokenizer, strings: Sequence[str], context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(map(len, strings)) - 1
        self._tail = ""  # end of the text read: a string may begin in it
        self._token_ids = list(context)
        self._num_read = len(self._text()) if context else 0  # characters of their text
        self._num_closed = len(context)  # of these tokens, those whose text is complete

    def append(self, token_id: int) -> bool:
        """Take in the next token; True if it completes a string."""
        self._token_ids.append(token_id)
        text = self._text()
        num_open = min(len(text) - len(text.rstrip(_INCOMPLETE)), _LONGEST_INCOMPLETE)
        num_known = len(text) - num_open
        window = self._tail + text[self._num_read : num_known]
        if any(string in window for string in self._strings):
            return True
        self._tail = window[len(window) - min(self._overlap, len(window)) :]
        self._num_read = max(self._num_read, num_known)
        # Bytes that more than three tokens have not completed will never be a character.
        if num_open == 0 or len(self._token_ids) - self._num_closed > _LONGEST_INCOMPLETE:
            self._close(num_open)
        return False

    def _close(self, num_open: int) -> None:
        """Forget the tokens before those read last, once there are many."""
        if len(self._token_ids) >= LONGEST_READ:
            self._token_ids = self._token_ids[self._num_closed :]
            self._num_read = max(len(self._text()) - num_open, 0)
        self._num_closed = len(self._token_ids)

    def _text(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=False)


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
