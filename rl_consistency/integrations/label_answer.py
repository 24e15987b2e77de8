"""A patched model's answer to a trainer that calls it with labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from rl_consistency.models.packing import PaddedBatch, packed_inputs
from rl_consistency.models.scoring.scored_rows import Sampling
from rl_consistency.models.scoring.token_logprobs import LabelLogprobs, label_logprobs

Observer = Callable[[Tensor, PaddedBatch, LabelLogprobs], None]
"""Sees input ids [B, L], how they were packed, and their scores, in a pass with gradients."""


class LabelAnswer:
    """Canonical logprobs, in the form that the trainer asks for.

    TRL calls `model(input_ids, attention_mask, labels=..., fused_lm_head=True)` for a
    FusedCausalLMOutput; transformers' Trainer reads the loss of `model(..., labels=...)`.

    Args:
        sampling: what the labels were sampled with; None for data.
        most_likely: fill in `is_top1`, which costs the LM head a second time.
        observers: told of every pass with gradients.
    """

    def __init__(
        self,
        sampling: Sampling | None = None,
        *,
        most_likely: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._sampling, self._most_likely, self._observers = sampling, most_likely, observers

    def __call__(
        self,
        policy: nn.Module,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        labels: Tensor,
        fused_lm_head: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        batch = packed_inputs(input_ids, attention_mask, position_ids, others)
        assert input_ids is not None  # packed_inputs asks for them
        if not fused_lm_head:
            _check_labels(batch, labels)
        scores = label_logprobs(
            policy,
            batch,
            input_ids,
            labels,
            self._sampling,
            most_likely=self._most_likely and fused_lm_head,
        )
        if torch.is_grad_enabled():
            for observe in self._observers:
                observe(input_ids, batch, scores)
        count = scores.mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss: Any = -scores.logprobs.sum() / count
        if not fused_lm_head:
            return CausalLMOutputWithPast(loss=loss)
        from trl.trainer.utils import FusedCausalLMOutput

        return FusedCausalLMOutput(
            loss=loss,
            log_probs=scores.logprobs,
            entropy=scores.entropy,
            is_top1=scores.most_likely,
            label_mask=scores.mask,
        )


def _check_labels(batch: PaddedBatch, labels: Tensor) -> None:
    """ValueError for labels that stock scores from a row that says nothing of them. They are left
    out here, and the trainer's divisor counts them. That in column 0 has no row in stock."""
    starts = torch.zeros_like(batch.mask[batch.mask])
    starts[list(itertools.accumulate(batch.packed.layout.query_lens[:-1], initial=0))] = True
    unscored = ~batch.mask | torch.zeros_like(batch.mask).masked_scatter(batch.mask, starts)
    if bool((unscored & (labels != -100))[:, 1:].any()):
        raise ValueError(
            "labels at padding, or at the first token of a sequence that does not begin its row; "
            "set them to -100: nothing that says something of them comes before."
        )
