"""An unpatched trainer's generation and training, watched so that their drift can be told."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.integrations.sampled import of_generate, of_trl_backend
from rl_consistency.models.scoring.label_logprobs import LabelLogprobs


def watched_generate(generate: Any, drift: RolloutDrift, eos_token_ids: list[int]) -> Any:
    """Hugging Face's `generate`, which also hands its logprobs to the drift.

    Scores of all tokens are kept until it returns: [tokens, vocabulary] fp32 for each sample.
    """

    @functools.wraps(generate)
    def watched(**arguments: Any) -> Tensor:
        found = generate(**arguments, return_dict_in_generate=True, output_scores=True)
        ids, mask = arguments["input_ids"], arguments["attention_mask"].bool()
        prompts = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        drift.sampled(prompts, of_generate(found, eos_token_ids))
        return found.sequences

    return watched


def watched_backend(generate: Any, drift: RolloutDrift) -> Any:
    """TRL's `VLLMGeneration.generate`, which also hands its logprobs to the drift."""

    @functools.wraps(generate)
    def watched(prompts: list[list[int]], *args: Any, **arguments: Any) -> Any:
        found = generate(prompts, *args, **arguments)
        drift.sampled(prompts, of_trl_backend(*found[1:]))
        return found

    return watched


def watched_forward(forward: Any, drift: RolloutDrift) -> Any:
    """TRL's forward with a fused LM head, which also hands what it scored to the drift."""

    @functools.wraps(forward)
    def watched(*args: Any, **arguments: Any) -> Any:
        output = forward(*args, **arguments)
        if arguments.get("fused_lm_head") and torch.is_grad_enabled():
            drift.observe(
                arguments["input_ids"],
                arguments["attention_mask"].bool(),
                LabelLogprobs(
                    output.log_probs.float(), output.entropy, output.label_mask, most_likely=None
                ),
            )
        return output

    return watched
