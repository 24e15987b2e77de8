"""What the same tokens would have cost on the stock path: the drift that everybody else trains
with.

The unpatched Hugging Face model decodes them token by token with a KV cache (left-padded batch, as
a generation loop does), then scores them in one batched forward pass (right-padded, as a trainer
does). Both take log_softmax of the logits in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rl_consistency.models.batch_layout import lay_out
from rl_consistency.models.patch import PatchSession
from rl_consistency.parity.drift import DriftReport, compare_logprobs


@torch.no_grad()
def measure_stock_drift(
    session: PatchSession,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    batch_size: int = 64,
) -> DriftReport:
    """Drift between stock decoding and stock scoring of given tokens, under the current weights.

    Args:
        session: live patch of the policy; its stock model is used.
        sequences: prompt and completion ids.
        prompt_lengths: prompt tokens of each sequence.
        temperature: logits are divided by it; 0 is read as 1.
        batch_size: sequences of one decode batch; scoring takes all of a batch at once.

    Returns:
        The report over all completion tokens.
    """
    decoded: list[Tensor] = []
    scored: list[Tensor] = []
    with session.stock() as model, _evaluating(model):
        for start in range(0, len(sequences), batch_size):
            chunk = [list(s) for s in sequences[start : start + batch_size]]
            prompts = list(prompt_lengths[start : start + batch_size])
            decoded += _decode(model, chunk, prompts, temperature or 1.0)
            scored += _score(model, chunk, prompts, temperature or 1.0)
    return compare_logprobs(decoded, scored)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode: in training mode gradient checkpointing would throw the KV cache away."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _score(
    model: Any, sequences: list[list[int]], prompts: list[int], temperature: float
) -> list[Tensor]:
    ids, mask = lay_out(sequences, "right_padded", model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [
        _picked(logits[i, prompt - 1 : len(s) - 1], s[prompt:], temperature)
        for i, (s, prompt) in enumerate(zip(sequences, prompts, strict=True))
    ]


def _decode(
    model: Any, sequences: list[list[int]], prompts: list[int], temperature: float
) -> list[Tensor]:
    device = model.device
    only_prompts = [s[:prompt] for s, prompt in zip(sequences, prompts, strict=True)]
    ids, mask = lay_out(only_prompts, "left_padded", device)
    assert isinstance(ids, Tensor) and mask is not None
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    steps: list[Tensor] = []
    for tokens in _teacher_forced(sequences, prompts, device):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        steps.append(_picked(output.logits[:, -1], tokens.tolist(), temperature))
        ids = tokens.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    logprobs = torch.stack(steps, dim=1)
    return [
        logprobs[i, : len(s) - prompt]
        for i, (s, prompt) in enumerate(zip(sequences, prompts, strict=True))
    ]


def _teacher_forced(
    sequences: list[list[int]], prompts: list[int], device: torch.device
) -> Iterator[Tensor]:
    """[B] the next given token of each sequence; finished ones repeat their last token."""
    completions = [s[prompt:] for s, prompt in zip(sequences, prompts, strict=True)]
    for step in range(max(len(c) for c in completions)):
        yield torch.tensor([c[min(step, len(c) - 1)] for c in completions], device=device)


def _picked(logits: Tensor, tokens: Sequence[int], temperature: float) -> Tensor:
    """[n] fp32 logprob of one token per row of logits [n, V]."""
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
