"""Decode steps in a steady state: of sequences apart and of groups that share a prompt; exact
speculation."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch as attribute

import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import build_model
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.timing import Machine, against_stock, taken_bytes
from rl_consistency.models.families import num_experts
from rl_consistency.models.forward import cache_sizes
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.verify.presets import preset_config

SETTLING_STEPS = 12
"""Steps of a constant batch before it counts: the first of them captures the graph."""

EDITED, SPECULATION = 0.05, 7
"""Share of the prompt's tokens that a copy deviates from, and the most tokens of a draft."""


class Window(NamedTuple):
    """A steady state, in which every sequence gets one token a step."""

    steps: int
    seconds: float
    attended: int
    """Keys read, of all sequences in all steps."""
    idle_share: float | None
    """Share of the time that no replay of a CUDA graph covers: the host, or a copy it asked for,
    held the device up. None without graphs."""


@contextmanager
def patched_model(name: str, device: torch.device) -> Iterator[Any]:
    """A model of the benches under a patch, once the memory of the case before is freed."""
    taken_bytes(device)
    model = build_model(name, device)
    with patch(model):
        yield model


def engine_for(model: Any, workload: Workload, **settings: Any) -> RolloutEngine:
    """An engine with room for the whole workload at a time; `settings` are more of its own."""
    return RolloutEngine(
        model,
        eos_token_id=None,
        kv_block_size=16,
        num_kv_blocks=workload.kv_blocks(16),
        max_batch_tokens=16384,
        max_num_seqs=workload.sequences,
        tokens_per_sequence=workload.prompt_len + workload.longest + TOKENS_BEYOND,
        **settings,
    )


def steady(model: Any, workload: Workload, bench: Machine, **settings: Any) -> Window:
    """The steady state of a workload whose completions are all as long; `settings` are those of the
    engine. RuntimeError where too few steps decode all sequences."""
    engine, count = engine_for(model, workload, **settings), workload.sequences
    prompts, sampling = workload.prompts("steady", model.config.vocab_size), workload.requests()
    ticks: list[tuple[float, int, int]] = []  # after each step: seconds, tokens, replays
    with replay_events() as replays:
        # A group shares keys, which graphs of its own read.
        engine.warm_up(replace(sampling[0], n=workload.group_size))
        started = finished_seconds(bench.device)

        def tick(tokens: int, finished: int, total: int) -> None:
            ticks.append((time.perf_counter() - started, tokens, len(replays)))

        engine.generate(prompts, sampling, progress=tick)
    first, last = steady_ticks([tokens for _, tokens, _ in ticks], count, workload.longest)
    (start, tokens, begun), (end, _, done) = ticks[first], ticks[last]
    steps = last - first
    attended = steps * (count * workload.prompt_len + tokens) + count * steps * (steps - 1) // 2
    return Window(steps, end - start, attended, idle_share(replays[begun:done]))


def steady_ticks(tokens: Sequence[int], count: int, longest: int) -> tuple[int, int]:
    """The steps between which each of `count` sequences gets a token a step, of the tokens known
    after each step: without the first ones, and without the very last one, in which the engine also
    checks the weights."""
    gained = [i for i in range(len(tokens) - 2) if tokens[i + 1] - tokens[i] >= count <= tokens[i]][
        min(SETTLING_STEPS, longest // 4) :
    ]
    if not gained:
        raise RuntimeError(
            f"too few steps decoded all {count} sequences; ask for longer completions or fewer "
            "sequences."
        )
    return gained[0], gained[-1] + 1


@contextmanager
def replay_events() -> Iterator[list[tuple[Any, Any]]]:
    """Record an event before and after each `CUDAGraph.replay` inside the block."""
    found: list[tuple[Any, Any]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(graph)
        end.record()
        found.append((start, end))

    with attribute.object(torch.cuda.CUDAGraph, "replay", timed):
        yield found


def idle_share(replays: Sequence[tuple[Any, Any]]) -> float | None:
    """Share of the time from the first event to the last that no replay covers; None with fewer
    than two replays. Waits for the device."""
    if len(replays) < 2:
        return None
    replays[-1][1].synchronize()
    busy = sum(start.elapsed_time(end) for start, end in replays)
    return 1.0 - busy / replays[0][0].elapsed_time(replays[-1][1])


def steady_step(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """One decode step: the share of its time in which the device waits, and the bytes it must read
    over the copy bandwidth, over its time. Of groups, against each sequence having blocks of its
    own; bytes do not count there, since the chip's own memory serves shared keys and values."""
    with patched_model(name, bench.device) as model:
        weights, per_token = decode_bytes(model, workload.sequences)
        window = steady(model, workload, bench)
        apart = window
        if workload.group_size > 1:
            taken_bytes(bench.device)
            apart = steady(model, workload, bench, enable_prefix_sharing=False)
    if window.idle_share is None and bench.cuda:
        raise RuntimeError("no CUDA graph was replayed: decoding did not run through graphs")
    figures = {"context": window.attended / window.steps / workload.sequences}
    figures |= {} if window.idle_share is None else {"idle_share": window.idle_share}
    seconds = window.seconds / window.steps
    if apart is not window:
        stock, name = apart.seconds / apart.steps, "blocks of its own"
        return against_stock(seconds, stock, name, workload.sequences) | {"figures": figures}
    read = window.steps * weights + window.attended * per_token
    return {
        "ours_us": 1e6 * seconds,
        "tokens_per_second": {"ours": workload.sequences / seconds},
        "figures": figures,
        "ceiling_fraction": read / window.seconds / bench.copy_bandwidth,
    }


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


def copying(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """A text that is mostly copied: time without drafts over that with them. Prompts are stretches
    of a cycle through the vocabulary with edits, which the model writes without the edits.
    ConsistencyError where a token or a logprob's bytes differ."""
    taken_bytes(bench.device)
    model, draw = copying_model(name, bench.device), random.Random(0)
    size, prompts = model.config.vocab_size, []
    for start in draw.choices(range(size), k=workload.sequences):
        stretch = [(start + i) % size for i in range(1, workload.prompt_len)]
        prompts.append([draw.randrange(size) if draw.random() < EDITED else t for t in stretch])
        prompts[-1].append(start)
    found: dict[int, tuple[Any, ...]] = {}
    with patch(model):
        engine = engine_for(model, workload)
        for _ in ("capture", "measure"):
            for width in (0, SPECULATION):
                started = finished_seconds(bench.device)
                completions = engine.generate(prompts, workload.requests(speculation=width))
                seconds = (finished_seconds(bench.device) - started) / workload.longest
                found[width] = seconds, engine.stats, completions
    (stock, _, plain), (ours, statistics, drafted) = found.values()
    for a, b in zip(plain, drafted, strict=True):
        bits = [c.token_logprobs.view(torch.int32) for c in (a, b)]
        if a.token_ids != b.token_ids or not torch.equal(*bits):
            raise ConsistencyError(f"sequence {a.prompt_index} has other bytes with speculation.")
    figures = {"acceptance_rate": statistics.acceptance_rate, "steps": statistics.steps}
    return against_stock(ours, stock, "plain decoding", workload.sequences) | {"figures": figures}


def copying_model(name: str, device: torch.device) -> Any:
    """A preset that answers each token with the next one in the vocabulary.

    The projections out of attention and MLP are zero, which leaves a token's embedding as its
    hidden state; the untied LM head answers it with its successor. All kernels run at full size.
    """
    config = preset_config(name)
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        rows = model.get_input_embeddings().weight.data.normal_().float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # A hidden state has the length sqrt(hidden size) and meets its own direction here: the
        # successor's logit is far above all others, which are normal with deviation 1 to 2.
        gain = max(1.0, 24.0 / config.hidden_size**0.5)
        rows *= gain / rows.norm(dim=1, keepdim=True)
        model.get_output_embeddings().weight.copy_(rows.roll(1, 0))
    return model
