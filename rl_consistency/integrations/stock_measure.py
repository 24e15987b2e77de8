"""An unpatched trainer's generation and training, watched so that their drift can be told."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.models.token_logprobs import LabelLogprobs
from rl_consistency.rollout.completion import Completion


def watched_generate(generate: Any, drift: RolloutDrift, eos_token_ids: list[int]) -> Any:
    """Hugging Face's `generate`, which also hands its logprobs to the drift.

    Scores of all tokens are kept until it returns: [tokens, vocabulary] fp32 for each sample.
    """

    @functools.wraps(generate)
    def watched(**arguments: Any) -> Tensor:
        found = generate(**arguments, return_dict_in_generate=True, output_scores=True)
        ids, mask = arguments["input_ids"], arguments["attention_mask"].bool()
        prompts = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        drawn = found.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(
            [
                scores.float().log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1)
                for scores, token in zip(found.scores, drawn.unbind(1), strict=True)
            ],
            dim=1,
        ).cpu()
        completions = []
        for index, (row, values) in enumerate(zip(drawn.tolist(), logprobs, strict=True)):
            ends = [place for place, token in enumerate(row) if token in eos_token_ids]
            length = ends[0] + 1 if ends else len(row)
            reason = "stop" if ends else "length"
            completions.append(Completion(index, 0, row[:length], values[:length], reason))
        drift.sampled(prompts, completions)
        return found.sequences

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
