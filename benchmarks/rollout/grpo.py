"""A GRPO step end to end: rollout, the training forward and backward passes, the update.

Strict is this library's engine and scoring. Stock is the same engine with stock ops, then the
unpatched Hugging Face model, with log_softmax of the completions' logits. Optimizer, loss and
micro-batches are the same; rewards are a function of the tokens. All completions are as long, so
that stock pads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.rollout.decoding import MODES
from benchmarks.rollout.generation import engine_for, patched_model
from benchmarks.rollout.workload import Workload, requests
from benchmarks.timing import Machine
from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.models.patch import patched_session
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.drift import compare_logprobs
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.trainers.advantages import group_advantages
from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.losses import (
    LossConfig,
    TokenBatch,
    per_token,
    policy_loss,
    token_weights,
)
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.strategy import Replicated

LEARNING_RATE = 1e-6
MICRO_BATCH = 16
"""Sequences of one backward pass."""

ROUNDS = 2
"""Steps that count, behind one that captures graphs and compiles kernels."""

PHASES = ("rollout", "training", "update")


def grpo_step(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Time of a step with stock ops over that with canonical ones, and whose tokens drift."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with patched_model(name, bench.device) as model:
        engine = engine_for(model.train(), workload)
        accelerator = Accelerator(cpu=bench.device.type == "cpu", mixed_precision="no")
        section = OptimizerSection(learning_rate=LEARNING_RATE)
        ranks = Replicated(World.join(bench.device), PartOrder(1), model)
        optimizer = PolicyOptimizer(ranks, section, accelerator, total_steps=100)
        for i in range(1 + ROUNDS):
            for mode in MODES:
                times = _step(model, engine, optimizer, workload, mode, i)
                if i > 0:
                    found[mode].append(times)
    ours, stock = (median(sum(t[p] for p in PHASES) for t in found[mode]) for mode in MODES)
    figures = {}
    for mode, runs in found.items():
        figures |= {f"{mode}/{p}_seconds": median(t[p] for t in runs) for p in PHASES}
        for count in ("tokens", "mismatched_tokens"):
            figures[f"{mode}/{count}"] = sum(t[count] for t in runs)
    tokens = workload.sequences * workload.longest
    return {
        "ours_us": ours * 1e6,
        "stock_us": stock * 1e6,
        "stock": "the same engine with stock ops, Hugging Face training",
        "ratio": stock / ours,
        "tokens_per_second": {"ours": tokens / ours, "stock": tokens / stock},
        "figures": figures,
    }


def _step(
    model: Any, engine: RolloutEngine, optimizer: PolicyOptimizer, workload: Workload, mode: str,
    i: int,
) -> dict[str, float]:  # fmt: skip
    """Roll out, learn, update: seconds of each phase, tokens, and mismatched tokens."""
    device = model.device
    times = [finished_seconds(device)]
    prompts = workload.prompts(f"grpo {mode} {i}", model.config.vocab_size)
    with strict(mode == "strict"):
        completions = engine.generate(prompts, requests(workload.lengths()))
    sequences = [[*prompts[c.prompt_index], *c.token_ids] for c in completions]
    old_logprobs = torch.cat([c.token_logprobs for c in completions])
    times.append(finished_seconds(device))
    stock = patched_session(model).stock() if mode == "stock" else nullcontext()
    score = stock_scored if mode == "stock" else _scored
    with stock:
        logprobs = _learn(partial(score, model), sequences, old_logprobs.to(device), workload)
    times.append(finished_seconds(device))
    optimizer.step()
    times.append(finished_seconds(device))
    drift = compare_logprobs(old_logprobs, logprobs.cpu())
    spent = (end - start for start, end in pairwise(times))
    counts = {"tokens": drift.tokens, "mismatched_tokens": drift.mismatched_tokens}
    return dict(zip(PHASES, spent, strict=True)) | counts


def _learn(
    score: Callable[[list[list[int]], int], Tensor], sequences: list[list[int]],
    old_logprobs: Tensor, workload: Workload,
) -> Tensor:  # fmt: skip
    """Gradients of the step; returns the [N] logprobs that training computed.

    `score` takes sequences and how many tokens at their end are completion, and gives the fp32
    logprobs of those, differentiable.
    """
    new_tokens, device = workload.longest, old_logprobs.device
    rewards = [float(sequence[-1] % 2) for sequence in sequences]
    rewards[0] = 2.0  # no group structure may leave every advantage 0
    advantages = group_advantages(rewards, workload.group_size)
    found = []
    for first in range(0, len(sequences), MICRO_BATCH):
        part = slice(first, first + MICRO_BATCH)
        logprobs = score(sequences[part], new_tokens)
        lengths = [new_tokens] * len(sequences[part])
        ids = torch.arange(first, first + len(lengths))
        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=old_logprobs.view(-1, new_tokens)[part].flatten(),
            advantages=per_token(advantages[part], lengths).to(device),
            sequence_ids=per_token(ids, lengths).to(device),
            lengths=lengths,
        )
        total = new_tokens * len(sequences)
        weights = token_weights(lengths, "dapo", total_tokens=total, device=device)
        policy_loss(batch, weights, LossConfig()).loss.backward()
        found.append(logprobs.detach())
    return torch.cat(found)


def _scored(model: Any, sequences: list[list[int]], new_tokens: int) -> Tensor:
    prompt_lengths = [len(sequence) - new_tokens for sequence in sequences]
    return token_logprobs(model, sequences, prompt_lengths=prompt_lengths).logprobs


def stock_scored(model: Any, sequences: list[list[int]], new_tokens: int) -> Tensor:
    """[N] logprobs of the last `new_tokens` of each sequence by the unpatched model; all sequences
    are as long, so there is neither padding nor a mask."""
    ids = torch.tensor(sequences, device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=new_tokens + 1).logits[:, :-1]
    logprobs = logits.float().log_softmax(dim=-1)
    return logprobs.gather(2, ids[:, -new_tokens:, None]).flatten()
