"""What the same tokens cost on the stock path: its drift and its seconds.

The unpatched Hugging Face model decodes them token by token with a KV cache (left-padded batch, as
a generation loop does), then scores them in one batched forward pass (right-padded, as a trainer
does). Both take the logit less the logsumexp in fp32, as TRL does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rl_consistency.models.moe import stock_routing
from rl_consistency.models.packing import lay_out
from rl_consistency.models.patch import PatchSession
from rl_consistency.models.stock import selective_log_softmax
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.parity.drift import DriftReport, compare_logprobs
from rl_consistency.parity.gradients import gradients_kept
from rl_consistency.parity.histograms import drift_histograms

SHARE_FOR_LOGITS = 0.25
"""Most of a GPU's free memory that the logits of one stock call may take."""
BATCH = 64
"""Most sequences of one decode batch."""
GROUPED_BYTES = 16
"""What the rows of operands of `torch.nn.functional.grouped_mm` are multiples of."""


@dataclass(frozen=True, kw_only=True)
class StockShadow:
    """The stock path over given tokens."""

    drift: DriftReport
    """Stock decoding against stock scoring, over all completion tokens; their experts too."""
    counts: Mapping[str, int]
    """Their histograms, by metric."""
    rollout_seconds: float
    """Decoding of all completions, without sampling."""
    training_seconds: float | None
    """Forward and backward passes over all sequences; None without a micro-batch size."""


def shadow_stock_path(
    session: PatchSession,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    batch_size: int = BATCH,
    micro_batch_size: int | None = None,
) -> StockShadow:
    """Stock decoding, scoring and training of given tokens, under the current weights.

    Gradients present before the call are put back after it; weights are not touched. Experts whose
    rows are no multiple of 16 bytes, which torch's grouped product refuses, run one by one.

    Args:
        session: live patch of the policy; its stock model is used.
        sequences: prompt and completion ids.
        prompt_lengths: prompt tokens of each sequence.
        temperature: logits are divided by it; 0 is read as 1.
        batch_size: sequences of one decode batch, fewer where a GPU has no room for their logits.
        micro_batch_size: sequences of one forward and backward pass; None leaves training out.
    """
    sides: tuple[list[_Scored], list[_Scored]] = [], []
    rollout_seconds, training_seconds = 0.0, None
    scale = temperature or 1.0
    with session.stock() as model, _experts_of_any_width(model):
        device = next(model.parameters()).device
        # In training mode gradient checkpointing would throw the KV cache away.
        with mode(model, training=False), torch.no_grad():
            for batch in _batches(model, sequences, prompt_lengths, batch_size):
                started = finished_seconds(device)
                sides[0].append(_decode(model, batch, scale))
                rollout_seconds += finished_seconds(device) - started
                sides[1].append(_score(model, batch, scale))
        if micro_batch_size is not None:
            batches = _batches(model, sequences, prompt_lengths, micro_batch_size)
            with mode(model, training=True), gradients_kept(model):
                model.zero_grad(set_to_none=True)
                started = finished_seconds(device)
                for batch in batches:
                    (-torch.cat(_score(model, batch, scale)[0]).mean()).backward()
                training_seconds = finished_seconds(device) - started
    parts = [[t for batch in side for t in batch[of]] for of in (0, 1) for side in sides]
    decoded, scored, *experts = parts
    routing = (experts[0], experts[1]) if experts[0] else None
    return StockShadow(
        drift=compare_logprobs(decoded, scored, routing=routing),
        counts=drift_histograms(decoded, scored, "stock"),
        rollout_seconds=rollout_seconds,
        training_seconds=training_seconds,
    )


def within_budget(
    sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], steps: int | None
) -> list[Sequence[int]]:
    """The first sequences and of them the beginnings that stock decoding reads in `steps` calls,
    None: any number: as many whole batches as fit, of one that does not fit `steps` tokens each."""
    longest = max(len(s) - prompt for s, prompt in zip(sequences, prompt_lengths, strict=True))
    batches = len(sequences) if steps is None else max(steps // max(longest, 1), 1)
    pairs = list(zip(sequences, prompt_lengths))[: batches * BATCH]
    return [s if steps is None else s[: prompt + steps] for s, prompt in pairs]


@contextmanager
def _experts_of_any_width(model: Any) -> Iterator[None]:
    """Inside the block no grouped product of experts refuses its operands."""
    odd = any(
        parameter.shape[-1] * parameter.element_size() % GROUPED_BYTES
        for name, parameter in model.named_parameters()
        if ".mlp.experts." in name
    )
    before = model.get_experts_implementation() if odd else {}
    if "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


_Batch = list[tuple[list[int], int]]
"""Sequences, each with its prompt's length."""
_Scored = tuple[list[Tensor], list[Tensor]]
"""[completion length] of each sequence: fp32 logprobs, and routing (no tensor in a dense model)."""


def _batches(
    model: Any, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], size: int
) -> list[_Batch]:
    """`size` sequences at a time, or as many as have room for their logits."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        longest = max(len(sequence) for sequence in sequences)
        each = longest * model.config.vocab_size * model.dtype.itemsize
        size = max(1, min(size, int(free * SHARE_FOR_LOGITS) // each))
    pairs = [(list(s), prompt) for s, prompt in zip(sequences, prompt_lengths, strict=True)]
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]


@contextmanager
def mode(model: Any, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode inside the block."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


def _score(model: Any, batch: _Batch, temperature: float) -> _Scored:
    ids, mask = lay_out([s for s, _ in batch], "right_padded", model.device)
    assert isinstance(ids, Tensor)
    with stock_routing(model) as routed:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    rows = [slice(n - 1, len(s) - 1) for s, n in batch]
    logprobs = [
        selective_log_softmax(logits[i, rows[i]].float() / temperature, ids[i, n : len(s)])
        for i, (s, n) in enumerate(batch)
    ]
    met = [routing.view(len(ids), -1) for routing in routed]
    return logprobs, [each[i, scored] for each in met for i, scored in enumerate(rows)]


def _decode(model: Any, batch: _Batch, temperature: float) -> _Scored:
    ids, mask = lay_out([s[:prompt] for s, prompt in batch], "left_padded", model.device)
    assert isinstance(ids, Tensor) and mask is not None
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    longest = max(len(s) - prompt for s, prompt in batch)
    # From transformers 5.24 on; 5.40 knows the old name no more.
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    # Finished sequences repeat their last token.
    given = [[*s[prompt:], *s[-1:] * (longest - len(s) + prompt)] for s, prompt in batch]
    steps: list[Tensor] = []
    with stock_routing(model) as routed:
        for tokens in torch.tensor(given, device=model.device).unbind(dim=1):
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            output = model(**inputs, **{name: cache}, use_cache=True)
            last = output.logits[:, -1].float() / temperature
            steps.append(selective_log_softmax(last, tokens))
            ids = tokens.unsqueeze(1)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
    met = [rows.view(len(batch), -1)[:, -1] for rows in routed]

    def of_each(columns: list[Tensor]) -> list[Tensor]:
        rows = torch.stack(columns, dim=1) if columns else ()
        return [row[: len(s) - prompt] for row, (s, prompt) in zip(rows, batch)]

    return of_each(steps), of_each(met)
