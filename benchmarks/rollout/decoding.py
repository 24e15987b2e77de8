"""Decoding measured: against stock ops, the memory's bandwidth, the idle device, long contexts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from benchmarks.rollout.experts_hit import evenly_hit, experts_hit
from benchmarks.rollout.generation import (
    Generation,
    Window,
    engine_for,
    patched_model,
    release_memory,
    timed_generation,
)
from benchmarks.rollout.workload import DecodeBytes, Workload, requests, tokens_attended
from benchmarks.timing import Machine
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs
from rl_consistency.verify.substitution import attribute

MODES = ("strict", "stock")
"""Ours, and the same engine with stock ops."""

READINGS = (
    ("once for the group", True, True),
    ("by each sequence, blocks of the group", False, True),
    ("by each sequence, blocks of its own", True, False),
)
"""How a group's prompt is read, whether attention may read it once, whether blocks are shared."""

SETTLING_STEPS = 12
"""Steps of a constant batch before it counts: the first of them captures the graph."""


def decode(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Decode throughput of one engine, its ops canonical and stock; times are of one token."""
    found: dict[str, dict[str, float]] = {}
    with patched_model(name, bench.device) as model:
        engine, needed = engine_for(model, workload), DecodeBytes.of(model)
        vocabulary = model.config.vocab_size
        # Capture the graphs of every batch size, for stock attention at every context it meets.
        lens = {"strict": [workload.prompt_len], "stock": workload.warm_up_prompt_lens()}
        for mode, length in [(m, length) for m in MODES for length in lens[m]]:
            prompts = workload.prompts(f"warm-up {mode}", vocabulary, length)
            with strict(mode == "strict"):
                timed_generation(engine, prompts, requests(workload.warm_up_lengths()), bench)
        prompts = workload.prompts(f"{name} 0", vocabulary)
        for mode in MODES:
            with strict(mode == "strict"):
                generation = timed_generation(engine, prompts, requests(workload.lengths()), bench)
            found[mode] = _figures(generation, workload, needed, bench)
    ours, stock = (found[mode]["decode_tokens_per_second"] for mode in MODES)
    return {
        "ours_us": 1e6 / ours,
        "stock_us": 1e6 / stock,
        "stock": "the same engine with stock ops",
        "ratio": ours / stock,
        "ceiling_fraction": found["strict"]["roofline_share"],
        "tokens_per_second": {"ours": ours, "stock": stock},
        "figures": {f"{mode}/{key}": v for mode, f in found.items() for key, v in f.items()},
    }


def _figures(
    generation: Generation, workload: Workload, needed: DecodeBytes, bench: Machine
) -> dict[str, float]:
    window, statistics = generation.decoding(), generation.statistics
    prefill_seconds = generation.ticks[generation.prefill_end].seconds
    lengths = workload.lengths()
    attended = sum(tokens_attended(workload.prompt_len, n) for n in lengths)
    # Tokens of mixed steps, before the window, are a share of a percent of all.
    attended *= window.tokens / sum(n - 1 for n in lengths)
    least = needed.read(window.steps, attended) / bench.ceilings.copy_bandwidth
    return {
        "seconds": generation.seconds,
        "new_tokens_per_second": generation.new_tokens_per_second,
        "decode_tokens_per_second": window.tokens_per_second,
        "steps": statistics.steps,
        "prefill_tokens_per_second": statistics.prefill_tokens / prefill_seconds,
        "preemptions": statistics.preemptions,
        "first_token_seconds": generation.first_token_seconds,
        "mean_first_token_seconds": statistics.mean_seconds_to_first_token,
        "host_ms_per_step": 1e3 * statistics.host_seconds_per_step,
        "roofline_share": least / window.seconds,
    }


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
    figures |= {
        "context": attended / window.steps / workload.sequences,
        "weight_bytes": needed.weights,
        "kv_bytes": attended * needed.per_token / window.steps,
        "bytes_per_second": read_per_second,
    }
    if hit:
        even = len(hit) * evenly_hit(model.config, workload.sequences)
        figures |= {"experts_hit": sum(hit), "experts_hit_if_even": even}
        figures["expert_bytes"] = sum(hit) * needed.per_expert
    return fields | {"ceiling_fraction": read_per_second / bench.ceilings.copy_bandwidth}


def shared_keys(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """One decode step of groups whose prompts are read once, against each sequence reading its own
    prompt, from the blocks of the group or from blocks of its own; the faster one counts."""
    windows: dict[str, Window] = {}
    with patched_model(name, bench.device) as model:
        for way, reads_once, shares in READINGS:
            release_memory()
            # The property asks whether keys are read once; False has every sequence read its own.
            blocked = nullcontext() if reads_once else attribute(DecodeGraphs, "share_keys", False)
            with blocked:
                windows[way] = steady_window(model, workload, bench, enable_prefix_sharing=shares)
    ours = windows.pop(READINGS[0][0])
    peers = {way: window.step_seconds * 1e6 for way, window in windows.items()}
    stock = min(peers, key=peers.__getitem__)
    return {
        "ours_us": ours.step_seconds * 1e6,
        "stock_us": peers[stock],
        "stock": stock,
        "peers": peers,
        "ratio": peers[stock] / (ours.step_seconds * 1e6),
        "tokens_per_second": {
            "ours": ours.tokens_per_second,
            "stock": windows[stock].tokens_per_second,
        },
    }


def steady_window(model: Any, workload: Workload, bench: Machine, **settings: Any) -> Window:
    """The steady state of a workload whose sequences are all as long; `settings` of the engine."""
    return steady_generation(model, workload, bench, **settings)[1]


def steady_generation(
    model: Any, workload: Workload, bench: Machine, **settings: Any
) -> tuple[list[list[int]], Window]:
    """Sequences of a workload, each a prompt and what was decoded behind it; their steady state."""
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


def long_context(
    bench: Machine, model: str, long: int, short: int, new_tokens: int
) -> dict[str, Any]:
    """Time of a token of one sequence behind `long` tokens, over that behind `short` ones."""
    seconds = {}
    with patched_model(model, bench.device) as policy:
        for length in (short, long):
            workload = Workload.equal(1, 1, length - new_tokens, new_tokens)
            seconds[length] = steady_window(policy, workload, bench).step_seconds
    times = seconds[long] / seconds[short]
    return {
        "ours_us": seconds[long] * 1e6,
        "tokens_per_second": {"ours": 1 / seconds[long]},
        "figures": {"short_us": seconds[short] * 1e6, "times_short": times},
    }
