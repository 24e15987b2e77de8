"""The result of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_consistency.rollout.sequence import FinishReason, RolloutSequence
from rl_consistency.rollout.stop_strings import Detokenizer


@dataclass(frozen=True, eq=False)
class Completion:
    """One sample: a prompt [7, 8] whose second sample was 3, 5 and then eos (2) gives

    Completion(prompt_index=0, sample_index=1, token_ids=[3, 5, 2],
               token_logprobs=tensor([-1.2, -0.1, -0.7]), finish_reason="stop",
               request_id="request-0")
    """

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    """Generated tokens, the stop token included."""
    token_logprobs: Tensor
    """[len(token_ids)] fp32 on the CPU, under the distribution the tokens were drawn from."""
    finish_reason: FinishReason
    """"stop": an eos, a stop token or a stop string was drawn; "length": `max_tokens` was reached;
    "cancelled" and "error" (see `error`) keep the tokens drawn before."""
    request_id: str = ""
    error: str | None = None
    """Prompt, sample and position at which the model gave a logprob that is not finite."""
    routing: Tensor | None = None
    """[len(token_ids)] int64 on the CPU, `expert_fingerprints` of the rows the tokens were drawn
    from; None in a dense model, and where no token was drawn."""
    seed: int | None = None
    """The seed of its random numbers: in `SamplingParams` it repeats them for this prompt id."""
    prompt_token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    """Text of `token_ids` without special tokens; None where the engine has no tokenizer."""

    @classmethod
    def of(cls, sequence: RolloutSequence, tokenizer: Detokenizer | None = None) -> Completion:
        num_prompt_tokens = sequence.num_prompt_tokens
        token_ids, text = sequence.token_ids[num_prompt_tokens:], None
        if tokenizer is not None:  # it may change the copy it is given
            text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert sequence.finish_reason is not None
        return cls(
            prompt_index=sequence.prompt_index,
            sample_index=sequence.sample_index,
            token_ids=token_ids,
            token_logprobs=torch.tensor(sequence.token_logprobs, dtype=torch.float32),
            finish_reason=sequence.finish_reason,
            request_id=sequence.request_id,
            error=sequence.error,
            routing=torch.tensor(sequence.token_routing) if sequence.token_routing else None,
            seed=sequence.params.seed,
            prompt_token_ids=sequence.token_ids[:num_prompt_tokens],
            text=text,
        )


def routing_of(completions: Sequence[Completion]) -> list[Tensor] | None:
    """The routing of each completion's tokens; None in a dense model, where no completion has one.

    ValueError where only some completions with tokens have it.
    """
    if all(c.routing is None for c in completions):
        return None
    if lacking := [c for c in completions if c.routing is None and c.token_ids]:
        named = ", ".join(f"prompt {c.prompt_index} sample {c.sample_index}" for c in lacking)
        raise ValueError(
            f"{len(lacking)} of {len(completions)} completions have no routing: {named}. The "
            "experts of rollout and training are compared for all tokens of a sparse model or for "
            "none; take completions of one engine, as it returned them."
        )
    none = torch.empty(0, dtype=torch.int64)
    return [none if c.routing is None else c.routing for c in completions]
