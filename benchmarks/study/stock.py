"""Generation and scoring of an unpatched Hugging Face model, as a stock trainer calls them."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rl_consistency.models.packing import lay_out
from rl_consistency.models.scoring.token_logprobs import TokenLogprobs
from rl_consistency.models.stock import selective_log_softmax
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.sampling_params import SamplingParams


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    seed: int,
) -> list[Completion]:
    """`sampling.n` completions of each prompt, as `generate` of transformers draws them: one
    left-padded batch, a key/value cache, a token a step. Logprobs are fp32 log-softmaxes of the
    logits over the temperature. ValueError where tokens may be ruled out at a temperature above 0,
    and for logits that are not finite.
    """
    greedy = sampling.temperature == 0
    if sampling.restricts_support and not greedy:
        raise ValueError(
            "stock sampling draws from the whole vocabulary: leave top_k, top_p, min_p."
        )
    rows = [list(prompt) for prompt in prompts for _ in range(sampling.n)]
    ids, mask = lay_out(rows, "left_padded", model.device)
    assert isinstance(ids, Tensor) and mask is not None
    generator = torch.Generator(model.device).manual_seed(seed)
    ends = torch.tensor(sorted({*eos_token_ids, *sampling.stop_token_ids}), device=model.device)
    cache = DynamicCache(config=model.config)
    # From transformers 5.24 on; 5.40 knows the old name no more.
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    done = torch.zeros(len(rows), dtype=torch.bool, device=model.device)
    drawn: list[Tensor] = []
    logprobs: list[Tensor] = []
    for _ in range(sampling.max_tokens):
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        output = model(**inputs, **{name: cache}, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float() / (sampling.temperature or 1.0)
        if not logits.isfinite().all():
            raise ValueError("the stock model gave logits that are not finite; nothing was drawn.")
        if greedy:
            tokens = logits.argmax(dim=1)
        else:
            weights = torch.softmax(logits, dim=1)
            tokens = torch.multinomial(weights, 1, generator=generator).squeeze(1)
        drawn.append(tokens)
        logprobs.append(selective_log_softmax(logits, tokens))
        done |= torch.isin(tokens, ends)
        if done.all():
            break
        ids = tokens.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    stops, found = set(ends.tolist()), []
    columns = torch.stack(drawn, dim=1).tolist(), torch.stack(logprobs, dim=1).cpu()
    for row, (tokens, values) in enumerate(zip(*columns, strict=True)):
        length = next((i + 1 for i, t in enumerate(tokens) if t in stops), len(tokens))
        completion = Completion(
            prompt_index=row // sampling.n,
            sample_index=row % sampling.n,
            token_ids=tokens[:length],
            token_logprobs=values[:length].clone(),
            finish_reason="stop" if tokens[length - 1] in stops else "length",
        )
        found.append(completion)
    return found


def score(
    model: Any,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    temperature: float,
) -> TokenLogprobs:
    """Logprobs and entropies of the completions' tokens: one right-padded forward pass, log-softmax
    in fp32. Entropies have no gradient."""
    ids, mask = lay_out(sequences, "right_padded", model.device)
    assert isinstance(ids, Tensor)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    spans = list(zip(sequences, prompt_lengths, strict=True))
    places = [(i, j) for i, (tokens, n) in enumerate(spans) for j in range(n, len(tokens))]
    row, column = torch.tensor(places, device=model.device).unbind(dim=1)
    scaled = logits[row, column - 1].float() / temperature
    with torch.no_grad():
        every = torch.log_softmax(scaled, dim=1)
        entropy = -(every.exp() * every).sum(dim=1)
    return TokenLogprobs(
        logprobs=selective_log_softmax(scaled, ids[row, column]),
        entropy=entropy,
        lengths=[len(tokens) - n for tokens, n in spans],
    )
