"""Cases of logprobs straight from hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.cases.case import TINY_SHAPES, Case, Setting, seeds
from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs import op

PARAMETERS = ("temperature", "top_k", "top_p", "min_p")

KINDS: tuple[dict[str, Any], ...] = (
    *({}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.9}),
    *({"min_p": 0.05}, {"temperature": 0.0}),
)
"""Sampling parameters of the rows in turn, where they truncate."""


def token_logprobs_cases(setting: Setting) -> Iterator[Case]:
    """Whole rows, whose logits need never exist, at two temperatures; and truncated ones."""
    # A small head has so few weights that the errors of one draw are a matter of luck.
    draws = seeds(1 if setting.real else 8, 1)
    yield _case(setting, {}, draws)
    yield _case(setting, {"temperature": 0.9})
    yield _case(setting)


def head_probe(setting: Setting, rows: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, LM head, targets; of every seed the same but the targets."""
    hidden_size, vocab_size = setting.shapes.hidden_size, setting.shapes.vocab_size
    # Logits spread over a few nats, as at the tiny sizes: variances add up over hidden_size.
    scale = 0.02 * (TINY_SHAPES.hidden_size / hidden_size) ** 0.5
    hidden = setting.drawn((rows, hidden_size), 1, 0.1)
    weight = setting.drawn((vocab_size, hidden_size), 2, scale)
    targets = torch.tensor(probe_tokens([rows], vocab_size, seed=3)[0], device=setting.device)
    return hidden, weight, targets


def sampling_in_turn(
    kinds: tuple[dict[str, Any], ...], rows: int, device: torch.device
) -> SamplingRows:
    """Row i has the parameters of kind i, kinds repeated."""
    each = [SamplingRows.uniform(1, device=device, **kind) for kind in kinds]
    return SamplingRows.concatenate(each).select(torch.arange(rows, device=device) % len(kinds))


def targets_inside(hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows) -> Tensor:
    """The targets, replaced by the most likely token where truncation leaves them out."""
    logprobs, _ = op.token_logprobs(hidden, weight, targets, rows)
    best = op.lm_head_logits(hidden, weight).argmax(dim=1)
    return torch.where(logprobs.isfinite(), targets, best)


def _case(
    setting: Setting, kind: dict[str, Any] | None = None, draws: tuple[int, ...] = ()
) -> Case:
    """Rows of one kind, or None: of `KINDS` in turn, whose targets lie inside the support."""
    device = setting.device
    chunks = (16, 48, 256)

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        hidden, weight, targets = head_probe(setting, rows)
        if kind is None:
            sampling = sampling_in_turn(KINDS, rows, device)
            targets = targets_inside(hidden, weight, targets, sampling)
        else:
            sampling = SamplingRows.uniform(rows, device=device, **kind)
        return hidden, targets, *(getattr(sampling, name) for name in PARAMETERS), weight

    def draw_dys(rows: int, seed: int) -> tuple[Tensor, ...]:
        return setting.wide((rows,), seed + 3), 0.1 * setting.wide((rows,), seed + 4)

    def ours(
        hidden: Tensor, targets: Tensor, *rest: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        *parameters, weight = rest
        rows = SamplingRows(**dict(zip(PARAMETERS, parameters, strict=True)))
        return op.token_logprobs(hidden, weight, targets, rows, **options)

    def stock(hidden: Tensor, targets: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        # torch's own function: its bias at large vocabularies is part of the error that is shown.
        logprobs = F.linear(hidden, rest[-1]).float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    def exact(hidden: Tensor, targets: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        temperature = (kind or {}).get("temperature", 1.0)
        return op.token_logprobs_reference(hidden, rest[-1], targets, temperature)

    hidden_size, vocab_size = setting.shapes.hidden_size, setting.shapes.vocab_size
    name = "truncated" if kind is None else f"temperature {kind.get('temperature')}"
    return Case(
        op="token_logprobs",
        size=f"{hidden_size} x {vocab_size}" if draws else name,
        rows=("hidden", "targets", *PARAMETERS),
        shared=("weight",),
        gradients=("hidden", "weight"),
        outputs=("logprobs", "entropy"),
        draw=draw,
        draw_dys=draw_dys,
        call=ours,
        stock=stock,
        reference=None if kind is None else exact,
        seeds=draws,
        filler={"targets": op.IGNORED, "temperature": 1.0, "top_p": 1.0},
        forward_ways={
            f"chunk_tokens {chunk}": partial(ours, chunk_tokens=chunk) for chunk in chunks
        },
    )
