"""What a rollout did and how fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class RolloutStatistics:
    """Counters since the engine last began to work, that is of one `generate` or `stream`."""

    steps: int = 0
    prefill_tokens: int = 0
    """Tokens of prompts computed, and of sequences computed again: preempted or started over."""
    decode_tokens: int = 0  # tokens generated
    prefix_hit_tokens: int = 0  # tokens found in the cache instead of computed
    replayed_prefills: int = 0  # steps whose chunks ran through CUDA graphs of prefill
    preemptions: int = 0
    started_over: int = 0  # sequences computed again alone, since a logprob was not finite
    drafted_tokens: int = 0  # tokens guessed and verified
    accepted_tokens: int = 0  # those of them that were right
    discarded_rows: int = 0  # tokens sampled behind the end of a sample and thrown away
    num_kv_blocks: int = 0
    peak_kv_blocks: int = 0  # most blocks held by running sequences at a time
    seconds: float = 0.0  # from the first request to the last step
    host_seconds: float = 0.0
    """Part of `seconds` in which the host does not wait for the device; on a CPU with the model."""
    first_tokens: int = 0  # samples whose first token was reported
    first_token_seconds: float = 0.0
    """Sum over these samples, each from its submission to its first token."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Speed over all of `seconds`, decoding included: not the speed of prefill alone."""
        return _ratio(self.prefill_tokens, self.seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed over all of `seconds`, prefill included: not the speed of decoding alone."""
        return _ratio(self.decode_tokens, self.seconds)

    @property
    def mean_seconds_to_first_token(self) -> float:
        return _ratio(self.first_token_seconds, self.first_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were right; 0 without drafts."""
        return _ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def peak_kv_share(self) -> float:
        return _ratio(self.peak_kv_blocks, self.num_kv_blocks)

    @property
    def host_seconds_per_step(self) -> float:
        return _ratio(self.host_seconds, self.steps)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
