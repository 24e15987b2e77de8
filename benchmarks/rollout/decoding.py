"""Decode steps in a steady state: of sequences apart, and of groups that share a prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.models import build_model
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.timing import Machine, row_fields, taken_bytes
from rl_consistency.models.families import num_experts
from rl_consistency.models.forward import cache_sizes
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.engine import RolloutEngine

SETTLING_STEPS = 12
"""Steps of a constant batch before it counts: the first of them captures the graph."""
APART = "blocks of its own"


def steady(
    model: Any, workload: Workload, bench: Machine, *, sharing: bool = True
) -> tuple[float, float]:
    """Seconds of a step that gives every sequence a token, and the keys that it reads, on average
    over the steady state of a workload whose completions are all as long. RuntimeError where too
    few steps decode all sequences."""
    count = workload.sequences
    engine = RolloutEngine(
        model,
        eos_token_id=None,
        kv_block_size=16,
        num_kv_blocks=workload.kv_blocks(16),
        max_batch_tokens=16384,
        max_num_seqs=count,
        tokens_per_sequence=workload.prompt_len + workload.longest + TOKENS_BEYOND,
        enable_prefix_sharing=sharing,
    )
    prompts, sampling = workload.prompts("steady", model.config.vocab_size), workload.requests()
    ticks: list[tuple[float, int]] = []  # after each step: seconds, tokens
    # A group shares keys, which graphs of its own read.
    engine.warm_up(replace(sampling[0], n=workload.group_size))
    started = finished_seconds(bench.device)

    def tick(tokens: int, finished: int, total: int) -> None:
        ticks.append((time.perf_counter() - started, tokens))

    engine.generate(prompts, sampling, progress=tick)
    first, last = steady_ticks([tokens for _, tokens in ticks], count, workload.longest)
    (start, tokens), (end, _), steps = ticks[first], ticks[last], last - first
    attended = steps * (count * workload.prompt_len + tokens) + count * steps * (steps - 1) // 2
    return (end - start) / steps, attended / steps


def steady_ticks(tokens: Sequence[int], count: int, longest: int) -> tuple[int, int]:
    """The steps between which each of `count` sequences gets a token a step, of the tokens known
    after each step: without the first ones, and without the very last one, in which the engine also
    checks the weights."""
    gained = [i for i in range(len(tokens) - 2) if tokens[i + 1] - tokens[i] >= count <= tokens[i]]
    gained = gained[min(SETTLING_STEPS, longest // 4) :]
    if not gained:
        raise RuntimeError(
            f"too few steps decoded all {count} sequences; ask for longer or fewer ones."
        )
    return gained[0], gained[-1] + 1


def steady_step(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """One decode step: the bytes it must read over the copy bandwidth, over its time. Of groups,
    against each sequence having blocks of its own; bytes do not count there, since the chip's own
    memory serves shared keys and values."""
    taken_bytes(bench.device)
    model: Any = build_model(name, bench.device)
    with patch(model):
        weights, per_token = decode_bytes(model, workload.sequences)
        seconds, attended = steady(model, workload, bench)
        times, ceiling = {"ours": seconds}, (weights + attended * per_token) / bench.copy_bandwidth
        if workload.group_size > 1:
            taken_bytes(bench.device)
            times[APART], ceiling = steady(model, workload, bench, sharing=False)[0], 0.0
    fields = row_fields(times, [APART], ceiling, workload.sequences)
    return fields | {"figures": {"context": attended / workload.sequences}}


def decode_bytes(model: Any, sequences: int) -> tuple[float, int]:
    """What a step must read: weights, and keys and values of a token in all layers.

    Of an embedding that is not the LM head only a few rows are read, which are not counted. Of a
    mixture of experts those count that even and independent routing would meet. What a step writes
    and its activations are under a percent and are left out.
    """
    table, config = model.get_input_embeddings().weight, model.config
    weights = float(sum(p.nbytes for p in model.parameters()))
    if table is not model.get_output_embeddings().weight:
        weights -= table.nbytes
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            chosen = config.num_experts_per_tok / num_experts(config)
            held = sum(p.nbytes for p in layer.mlp.experts.parameters())
            weights -= held * (1 - chosen) ** sequences
    layers, kv_heads, head_dim = cache_sizes(model)
    return weights, 2 * layers * kv_heads * head_dim * model.dtype.itemsize
