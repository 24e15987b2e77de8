"""The ways to run given tokens that `localize` compares: the sides of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.attention.paged_cache_triton import zero_cache
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.models.forward import cache_sizes, next_token_logits, paged_hidden_states
from rl_consistency.models.packing import Layout, lay_out
from rl_consistency.models.scoring.scored_rows import Sampling, scored_under
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.strict import OPS, Strictness, current, held
from rl_consistency.parity.gradients import gradients_kept
from rl_consistency.parity.stock import mode
from rl_consistency.parity.taps import FINAL_NORM, LM_HEAD, Tap, Taps, tapped

ROLLOUT, TRAINING, STOCK = "rollout", "training", "stock"
LAYOUTS: dict[str, Layout] = {
    "packed_with_gaps": "packed_with_gaps",
    "left_padded": "left_padded",
    "right_padded": "right_padded",
    "one_by_one": "packed",
    "again": "packed",
}
"""Other layouts of training, and training again."""
SIDES = (ROLLOUT, TRAINING, STOCK, *LAYOUTS)
"""Prompts read at once and completions decoded token by token through a paged cache; one packed
batch; the same with every op on its stock path; the other layouts."""

BLOCK_SIZE = 16
_LOGIT_ROWS = 256  # at a time: logits of all tokens may be larger than the model


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens to run, prompt first, and what the completions were sampled with."""

    sequences: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]
    sampling: Sampling | None = None

    @property
    def scored(self) -> list[int]:
        """The token before each scored one, counted over all sequences one after another."""
        ends = accumulate(map(len, self.sequences))
        parts = zip(ends, self.sequences, self.prompt_lengths, strict=True)
        spans = (range(end - len(ids) + prompt - 1, end - 1) for end, ids, prompt in parts)
        return [*chain.from_iterable(spans)]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one side gave, on the CPU."""

    logprobs: Tensor  # [scored] fp32
    choices: Tensor  # [scored] int64, the most likely token
    forward: dict[Tap, Tensor]
    """[tokens, features] by op, in order of execution."""
    backward: dict[Tap, Tensor]
    """Gradients in order of the backward pass; empty without one."""


def run_side(
    model: Any,
    side: str,
    work: Work,
    *,
    taps: bool = True,
    gradients: bool = True,
    choice: Strictness | None = None,
) -> Outcome:
    """Run the tokens one way under a choice of stock ops; None: the side's own.

    `gradients`: where the side trains, also those of the logprobs weighted by fixed random numbers,
    one per token. Gradients found before are put back.
    """
    if side == STOCK and choice is None:
        choice = Strictness(frozenset(OPS))
    lengths = [len(sequence) for sequence in work.sequences]
    gradients = gradients and side != ROLLOUT and _can_train(model)
    with (
        held(choice or current()),
        whole_weights(model),  # a wrapper around it is left alone: other ranks take no part
        mode(model, training=False),
        gradients_kept(model),
        tapped(model, lengths, only=None if taps else FINAL_NORM) as found,
    ):
        if side == ROLLOUT:
            with torch.no_grad():
                logprobs, choices = _decoded(model, work, found)
        else:
            logprobs = _trained(model, side, work, found, gradients=gradients)
            if model.lm_head.weight is not model.get_input_embeddings().weight:
                found.of_parameters("token_logprobs", model.lm_head)
            hidden = found.forward()[FINAL_NORM][work.scored].split(_LOGIT_ROWS)
            with torch.no_grad():
                logits = (next_token_logits(model, part.to(model.device)) for part in hidden)
                choices = torch.cat([rows.argmax(dim=1).cpu() for rows in logits])
        forward = {**found.forward(), Tap("token_logprobs", LM_HEAD): logprobs.unsqueeze(1)}
        return Outcome(logprobs, choices, forward, found.backward() if gradients else {})


def _can_train(model: Any) -> bool:
    trained = any(parameter.requires_grad for parameter in model.parameters())
    return trained and model.dtype != torch.float16


def _decoded(model: Any, work: Work, taps: Taps) -> tuple[Tensor, Tensor]:
    """Logprobs and most likely tokens, the prompts in one call and the rest token by token."""
    given, sampling = work.sequences, scored_under(work.sampling) if work.sampling else {}
    pairs = zip(given, work.prompt_lengths, strict=True)
    schedules = [[prompt, *[1] * (len(ids) - prompt)] for ids, prompt in pairs]
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in schedules]
    for call in paged_calls(schedules, block_size=BLOCK_SIZE, **cache_arguments(model)):
        ids = [t for i, a, b in call.spans for t in given[i][a:b]]
        positions = [p for _, a, b in call.spans for p in range(a, b)]
        both = torch.tensor([ids, positions], device=model.device)
        taps.members = [i for i, _, _ in call.spans]
        hidden = paged_hidden_states(model, both[0], both[1], call.paged)
        ends = zip(call.spans, call.paged.query_starts, call.paged.query_lens, strict=True)
        going = [(i, given[i][b], row + n - 1) for (i, _, b), row, n in ends if b < len(given[i])]
        if not going:
            continue
        owners, targets, rows = zip(*going, strict=True)
        logits = next_token_logits(model, hidden[torch.tensor(rows, device=hidden.device)])
        drawn = SamplingRows.uniform(len(rows), **sampling, device=logits.device)
        behaviour = distribution(logits, drawn)
        logprobs = behaviour.logprobs_of(torch.tensor(targets, device=logits.device)).cpu()
        for i, *pair in zip(owners, logprobs, logits.argmax(dim=1).cpu(), strict=True):
            found[i].append((pair[0], pair[1]))
    logprobs, choices = zip(*(pair for own in found for pair in own), strict=True)
    return torch.stack(logprobs), torch.stack(choices)


def _trained(model: Any, side: str, work: Work, taps: Taps, *, gradients: bool) -> Tensor:
    """Logprobs [scored], after a backward pass if gradients are wanted."""
    count = len(work.sequences)
    weights = torch.randn(len(work.scored), generator=torch.Generator().manual_seed(0))
    if gradients:
        model.zero_grad(set_to_none=True)
    logprobs: list[Tensor] = []
    first = 0
    for taps.members in [[i] for i in range(count)] if side == "one_by_one" else [range(count)]:
        sequences = [work.sequences[i] for i in taps.members]
        inputs, mask = lay_out(sequences, LAYOUTS.get(side, "packed"), model.device)
        prompts = [work.prompt_lengths[i] for i in taps.members]
        # Without gradients a GPU would fuse ops that training does not.
        with torch.set_grad_enabled(_can_train(model)):
            found = token_logprobs(
                model,
                inputs,
                attention_mask=mask,
                prompt_lengths=prompts,
                sampling=work.sampling,
                check_support=False,
            ).logprobs
            if gradients:
                (found * weights[first : first + len(found)].to(found)).sum().backward()
        first += len(found)
        logprobs.append(found.detach().cpu())
    return torch.cat(logprobs)


@dataclass(frozen=True)
class PagedCall:
    """One call: which tokens of which sequences, and the cache they see."""

    spans: list[tuple[int, int, int]]
    """(sequence, first token, end) of each part, in row order."""
    paged: PagedAttention


def cache_arguments(model: Any) -> dict[str, Any]:
    """The arguments of `paged_calls` that a model's cache has."""
    sizes = dict(zip(("num_layers", "kv_heads", "head_dim"), cache_sizes(model), strict=True))
    return {**sizes, "dtype": model.dtype, "device": model.device}


def paged_calls(
    schedules: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Iterator[PagedCall]:
    """The calls that feed some sequences part by part, their blocks scattered over a cache of NaN.

    `schedules` are the sizes of each sequence's parts; call i holds every sequence's part i.
    """
    needed = [-(-sum(parts) // block_size) for parts in schedules]
    placement = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0))
    tables = [part.tolist() for part in placement.split(needed)]
    size = (sum(needed), block_size, kv_heads, head_dim)
    key_cache, value_cache = (
        [zero_cache(*size, dtype=dtype, device=device).fill_(torch.nan) for _ in range(num_layers)]
        for _ in "kv"
    )
    done = [0] * len(schedules)
    for turn in range(max(map(len, schedules))):
        spans, slots = [], []
        for i, parts in enumerate(schedules):
            if turn < len(parts):
                start, done[i] = done[i], done[i] + parts[turn]
                spans.append((i, start, done[i]))
                places = (divmod(position, block_size) for position in range(start, done[i]))
                slots += [tables[i][block] * block_size + place for block, place in places]
        lens = [end - start for _, start, end in spans]
        paged = PagedAttention(
            query_starts=[sum(lens[:i]) for i in range(len(lens))],
            query_lens=lens,
            context_lens=[end for _, _, end in spans],
            block_tables=[tables[i] for i, _, _ in spans],
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(device),
            key_cache=key_cache,
            value_cache=value_cache,
            block_size=block_size,
        )
        yield PagedCall(spans, paged)
