"""Decoding against the memory's bandwidth, the idle device, groups, and long contexts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch as attribute

import torch

from benchmarks.rollout.generation import (
    Window,
    engine_for,
    patched_model,
    release_memory,
    timed_generation,
)
from benchmarks.rollout.workload import DecodeBytes, Workload, requests
from benchmarks.timing import Machine, against_stock
from rl_consistency.models.families import num_experts
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PackedBatch
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs

READINGS = (
    ("once for the group", True, True),
    ("by each sequence, blocks of the group", False, True),
    ("by each sequence, blocks of its own", True, False),
)
"""How a group's prompt is read, whether attention may read it once, whether blocks are shared."""

SETTLING_STEPS = 12
"""Steps of a constant batch before it counts: the first of them captures the graph."""

CHUNK_TOKENS, SAMPLED_STEPS = 16384, 8
"""Tokens of a forward pass, and steps whose experts are counted, at even distances."""


def steady_step(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """One decode step in a steady state: the share of its time in which the device waits, and the
    bytes it must read over the copy bandwidth, over its time. These count only where no two
    sequences share a prompt; else the chip's own memory would serve keys and values. Of a mixture
    of experts the experts count that its tokens were routed to, as measured."""
    with patched_model(name, bench.device) as model:
        needed = DecodeBytes.of(model)
        sequences, window = steady_generation(model, workload, bench)
        hit: list[float] = []
        if needed.per_expert and workload.group_size == 1:
            hit = experts_hit(model, sequences, workload.longest)
    idle = window.idle_share
    if idle is None and bench.device.type == "cuda":
        raise RuntimeError("no CUDA graph was replayed: decoding did not run through graphs")
    figures: dict[str, Any] = {} if idle is None else {"idle_share": idle}
    fields = {
        "ours_us": window.step_seconds * 1e6,
        "tokens_per_second": {"ours": window.tokens_per_second},
        "figures": figures,
    }
    if workload.group_size > 1:
        return fields
    attended = steady_attention(workload, window)
    read_per_second = needed.read(window.steps, attended, sum(hit)) / window.seconds
    figures["context"] = attended / window.steps / workload.sequences
    if hit:
        even = len(hit) * evenly_hit(model.config, workload.sequences)
        figures |= {"experts_hit": sum(hit), "experts_hit_if_even": even}
    return fields | {"ceiling_fraction": read_per_second / bench.ceilings.copy_bandwidth}


def shared_keys(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """One decode step of groups whose prompts are read once, against each sequence reading its own
    prompt, from the blocks of the group or from blocks of its own; the faster one counts."""
    windows: dict[str, Window] = {}
    with patched_model(name, bench.device) as model:
        for way, reads_once, shares in READINGS:
            release_memory()
            # The property asks whether keys are read once; False has every sequence read its own.
            alone = attribute.object(DecodeGraphs, "share_keys", False)
            with nullcontext() if reads_once else alone:
                _, window = steady_generation(model, workload, bench, enable_prefix_sharing=shares)
                windows[way] = window
    ours = windows.pop(READINGS[0][0]).step_seconds
    stock = min(windows, key=lambda way: windows[way].step_seconds)
    peers = {way: window.step_seconds * 1e6 for way, window in windows.items()}
    fields = against_stock(ours, windows[stock].step_seconds, stock, workload.sequences)
    return fields | {"peers": peers}


def long_context(
    bench: Machine, model: str, long: int, short: int, new_tokens: int
) -> dict[str, Any]:
    """Time of a token of one sequence behind `long` tokens, over that behind `short` ones."""
    seconds = {}
    with patched_model(model, bench.device) as policy:
        for length in (short, long):
            workload = Workload.equal(1, 1, length - new_tokens, new_tokens)
            seconds[length] = steady_generation(policy, workload, bench)[1].step_seconds
    times = seconds[long] / seconds[short]
    return {
        "ours_us": seconds[long] * 1e6,
        "figures": {"short_us": seconds[short] * 1e6, "times_short": times},
    }


def steady_generation(
    model: Any, workload: Workload, bench: Machine, **settings: Any
) -> tuple[list[list[int]], Window]:
    """Sequences of a workload whose completions are all as long, each a prompt and what was decoded
    behind it; and their steady state. `settings` are those of the engine."""
    engine = engine_for(model, workload, **settings)
    prompts = workload.prompts("steady", model.config.vocab_size)
    sampling = requests(workload.lengths())
    # The last step has fewer rows, so a graph of its own; groups share keys, which other graphs do.
    warm_up = replace(sampling[0], n=workload.group_size)
    generation = timed_generation(engine, prompts, sampling, bench, warm_up=warm_up)
    sequences = [prompts[c.prompt_index] + c.token_ids for c in generation.completions]
    return sequences, generation.steady(min(SETTLING_STEPS, workload.longest // 4))


def steady_attention(workload: Workload, window: Window) -> int:
    """Keys read in a window in which every sequence gets one token a step."""
    count, steps = workload.sequences, window.steps
    first = count * workload.prompt_len + window.tokens_before
    return steps * first + count * steps * (steps - 1) // 2


def experts_hit(model: Any, sequences: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
    """The distinct experts that a decode step meets in each sparse layer: the mean of some steps.

    A training forward over the same sequences routes as decoding did. `sequences` are all as long
    and end with `new_tokens` that were decoded together; steps are lined up by the position of
    their tokens, though a sequence may be a few tokens ahead of another.
    """
    length = len(sequences[0])
    fed = new_tokens - 1  # the last token is fed to no step
    steps = sorted({fed * i // SAMPLED_STEPS for i in range(SAMPLED_STEPS)})
    positions = torch.tensor([length - new_tokens + step for step in steps])
    together = max(CHUNK_TOKENS // length, 1)
    met: list[torch.Tensor] = []  # of each chunk [layers, sequences, steps, k]
    for first in range(0, len(sequences), together):
        chunk = sequences[first : first + together]
        batch = PackedBatch.from_sequences(chunk, model.device)
        rows = batch.token_rows.view(len(chunk), length)[:, positions.to(model.device)]
        with torch.no_grad(), numeric_settings(), recorded_routing() as record:
            packed_hidden_states(model, batch)
        met.append(torch.stack([layer.expert_ids[rows] for layer in record.layers]))
    ids = torch.cat(met, dim=1).transpose(1, 2).flatten(2)  # [layers, steps, sequences * k]
    distinct = 1 + (ids.sort(dim=-1).values.diff(dim=-1) != 0).sum(dim=-1)
    return distinct.double().mean(dim=1).tolist()


def evenly_hit(config: Any, num_sequences: int) -> float:
    """The distinct experts that a decode step would meet in one layer, if routing were even and
    tokens independent of each other."""
    experts = num_experts(config)
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** num_sequences)
