"""Exact speculation on a text that is mostly copied, by a random model that really copies.

Random weights copy nothing, so some are set by hand. The projections out of attention and MLP are
zero, which leaves a token's embedding as its hidden state; the untied LM head answers token i with
its successor in one random cycle through the vocabulary. All kernels run at their full size.

The prompt holds a stretch of that cycle with one token in twenty replaced, and ends right before
the stretch. The model then writes the text without the replacements, as an edit would be: drafts
looked up in the prompt are right except at the edited places.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.rollout.generation import Generation, engine_for, release_memory, timed_generation
from benchmarks.rollout.workload import Workload, requests
from benchmarks.timing import Machine, against_stock
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.verify.presets import preset_config

EDITED = 0.05
"""Share of the prompt's tokens that the text deviates from."""

SPECULATION = 7
"""Most tokens of a draft."""


def copying(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Decode time of a token without drafts over that with them, bytes compared."""
    release_memory()
    model, cycle = copying_model(name, bench.device)
    prompts = [edited_stretch(cycle, workload.prompt_len, i) for i in range(workload.sequences)]
    found: dict[int, Generation] = {}
    with patch(model):
        engine = engine_for(model, workload)
        for _ in ("capture", "measure"):
            for width in (0, SPECULATION):
                sampling = requests(workload.lengths(), speculation=width)
                found[width] = timed_generation(engine, prompts, sampling, bench)
    plain, drafted = found[0], found[SPECULATION]
    check_equal(plain, drafted)
    ours, stock = (1 / run.decoding().tokens_per_second for run in (drafted, plain))
    return against_stock(ours, stock, "plain decoding", 1) | {
        "figures": {
            "acceptance_rate": drafted.statistics.acceptance_rate,
            "steps": drafted.statistics.steps,
            "plain/steps": plain.statistics.steps,
        },
    }


def copying_model(name: str, device: torch.device) -> tuple[Any, list[int]]:
    """A preset that answers each token with its successor, and the cycle of all tokens."""
    config = preset_config(name)
    config.tie_word_embeddings = False
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.get_input_embeddings().weight.data.normal_()
    cycle = list(range(config.vocab_size))
    random.Random(0).shuffle(cycle)
    order = torch.tensor(cycle, device=device)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # A hidden state has the length sqrt(hidden size) and meets its own direction here: the
        # successor's logit is far above all others, which are normal with deviation 1 to 2.
        gain = max(1.0, 24.0 / config.hidden_size**0.5)
        rows = model.get_input_embeddings().weight.float()
        rows = gain * rows / rows.norm(dim=1, keepdim=True)
        model.get_output_embeddings().weight[order.roll(-1)] = rows[order].bfloat16()
    return model, cycle


def edited_stretch(cycle: list[int], prompt_len: int, which: int) -> list[int]:
    """[prompt_len] tokens: a stretch of the cycle with edits, then the token before the stretch."""
    draw = random.Random(which)
    start = draw.randrange(len(cycle))
    stretch = [cycle[(start + i) % len(cycle)] for i in range(prompt_len)]
    edited = [draw.choice(cycle) if draw.random() < EDITED else t for t in stretch[1:]]
    return [*edited, stretch[0]]


def check_equal(plain: Generation, drafted: Generation) -> None:
    """Raises: ConsistencyError where a token or a logprob's bytes differ."""
    for a, b in zip(plain.completions, drafted.completions, strict=True):
        bits = [c.token_logprobs.view(torch.int32) for c in (a, b)]
        if a.token_ids != b.token_ids or not torch.equal(*bits):
            raise ConsistencyError(
                f"sequence {a.prompt_index} decodes to other bytes with speculation than without"
            )
