"""Decoding measured: against stock ops, the memory's bandwidth, the idle device, long contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

from benchmarks.rollout.measure import (
    BLOCK_SIZE,
    MAX_BATCH_TOKENS,
    Generation,
    Window,
    timed_generation,
)
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.workload import (
    TOKENS_BEYOND,
    DecodeBytes,
    Workload,
    requests,
    tokens_attended,
)
from benchmarks.suite import Bench, Case
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.engine import RolloutEngine

Mode = Literal["strict", "stock"]
MODES: tuple[Mode, ...] = ("strict", "stock")

SETTLING_STEPS = 12
"""Steps of a constant batch before it counts: the first of them captures the graph."""


def engine_for(model: Any, workload: Workload, **options: Any) -> RolloutEngine:
    """An engine with room for the whole workload at a time."""
    return RolloutEngine(
        model,
        eos_token_id=None,
        kv_block_size=BLOCK_SIZE,
        num_kv_blocks=workload.kv_blocks(BLOCK_SIZE),
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_num_seqs=workload.sequences,
        tokens_per_sequence=workload.prompt_len + workload.longest + TOKENS_BEYOND,
        **options,
    )


def decode_case(
    shelf: ModelShelf,
    name: str,
    workload: Workload,
    *,
    rounds: int = 1,
    modes: Sequence[Mode] = MODES,
) -> Case:
    """Decode throughput of one engine, its ops canonical and stock by turns."""
    return Case(
        work="decode",
        shape={"model": name, **workload.shape},
        run=partial(_decode, shelf, name, workload, rounds, tuple(modes)),
    )


def _decode(
    shelf: ModelShelf,
    name: str,
    workload: Workload,
    rounds: int,
    modes: Sequence[Mode],
    bench: Bench,
) -> dict[str, Any]:
    found: dict[Mode, list[dict[str, float]]] = {mode: [] for mode in modes}
    with shelf.patched(name, bench.device) as model:
        engine, needed = engine_for(model, workload), DecodeBytes.of(model)
        for mode in modes:
            warm_up(engine, workload, model.config.vocab_size, mode, bench)
        for i in range(rounds):
            prompts = workload.prompts(f"{name} {i}", model.config.vocab_size)
            for mode in modes if i % 2 == 0 else modes[::-1]:
                with strict(mode == "strict"):
                    generation = timed_generation(
                        engine, prompts, requests(workload.lengths()), bench.device, bench.deadline
                    )
                found[mode].append(_figures(generation, workload, needed, bench))
    return _decode_fields({mode: _medians(runs) for mode, runs in found.items()})


def warm_up(
    engine: RolloutEngine, workload: Workload, vocabulary: int, mode: Mode, bench: Bench
) -> None:
    """Capture the graphs of every batch size, for stock attention at every context it meets."""
    lengths = requests(workload.warm_up_lengths())
    prompt_lens = workload.warm_up_prompt_lens() if mode == "stock" else [workload.prompt_len]
    for prompt_len in prompt_lens:
        prompts = workload.prompts(f"warm-up {mode}", vocabulary, prompt_len)
        with strict(mode == "strict"):
            timed_generation(engine, prompts, lengths, bench.device, bench.deadline)


def _figures(
    generation: Generation, workload: Workload, needed: DecodeBytes, bench: Bench
) -> dict[str, float]:
    window, statistics = generation.decoding(), generation.statistics
    prefill_seconds = generation.ticks[generation.prefill_end].seconds
    lengths = workload.lengths()
    attended = sum(tokens_attended(workload.prompt_len, n) for n in lengths)
    # Tokens of mixed steps, before the window, are a share of a percent of all.
    attended *= window.tokens / sum(n - 1 for n in lengths)
    least = needed.read(window.steps, attended) / bench.ceilings.copy_bandwidth
    figures = {
        "seconds": generation.seconds,
        "new_tokens": generation.new_tokens,
        "new_tokens_per_second": generation.new_tokens / generation.seconds,
        "decode_tokens_per_second": window.tokens_per_second,
        "decode_steps": window.steps,
        "steps": statistics.steps,
        "prefill_tokens_per_second": statistics.prefill_tokens / prefill_seconds,
        "prefix_hit_tokens": statistics.prefix_hit_tokens,
        "preemptions": statistics.preemptions,
        "first_token_seconds": generation.first_token_seconds,
        "mean_first_token_seconds": statistics.mean_seconds_to_first_token,
        "host_ms_per_step": 1e3 * statistics.host_seconds_per_step,
        "roofline_share": least / window.seconds,
    }
    if window.idle_share is not None:
        figures["idle_share"] = window.idle_share
    return figures


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: median(run[key] for run in runs if key in run) for key in runs[0]}


def _decode_fields(found: Mapping[Mode, Mapping[str, float]]) -> dict[str, Any]:
    """The fields of a row; its times are those of one decoded token."""
    names: dict[Mode, str] = {"strict": "ours", "stock": "stock"}
    rates = {names[mode]: f["decode_tokens_per_second"] for mode, f in found.items()}
    both = len(rates) == len(names)
    return {
        **{f"{name}_us": 1e6 / rate for name, rate in rates.items()},
        "stock": "the same engine with stock ops" if "stock" in rates else None,
        "ratio": rates["ours"] / rates["stock"] if both else None,
        "ceiling_fraction": found["strict"]["roofline_share"] if "strict" in found else None,
        "tokens_per_second": rates,
        "figures": {f"{mode}/{key}": v for mode, f in found.items() for key, v in f.items()},
    }


def roofline_case(
    shelf: ModelShelf, name: str, batch: int, *, prompt_len: int, new_tokens: int
) -> Case:
    """The bytes one decode step must read, over the measured copy bandwidth, over its time.

    No two sequences share a prompt, or the caches would be read from the chip's own memory.
    """
    workload = Workload(
        groups=batch, group_size=1, prompt_len=prompt_len, longest=new_tokens, shortest=new_tokens
    )
    return Case(
        work="decode step",
        shape={"model": name, **workload.shape},
        run=partial(_roofline, shelf, name, workload),
    )


def _roofline(shelf: ModelShelf, name: str, workload: Workload, bench: Bench) -> dict[str, Any]:
    with shelf.patched(name, bench.device) as model:
        needed = DecodeBytes.of(model)
        window = steady_window(model, workload, bench)
    attended = steady_attention(workload, window)
    read = needed.read(window.steps, attended)
    figures = {
        "context": attended / window.steps / workload.sequences,
        "weight_bytes": needed.weights,
        "kv_bytes": attended * needed.per_token / window.steps,
        "bytes_per_second": read / window.seconds,
        "ceiling": "copy bandwidth, bytes read + bytes written",
    }
    return {
        "ours_us": window.step_seconds * 1e6,
        "ceiling_fraction": read / bench.ceilings.copy_bandwidth / window.seconds,
        "tokens_per_second": {"ours": window.tokens_per_second},
        "figures": figures | _idle(window),
    }


def steady_window(model: Any, workload: Workload, bench: Bench) -> Window:
    """The steady state of a workload whose sequences are all as long."""
    engine = engine_for(model, workload)
    prompts = workload.prompts("steady", model.config.vocab_size)
    lengths = requests(workload.lengths())
    # The last step has fewer rows, so a graph of its own.
    generation = timed_generation(
        engine, prompts, lengths, bench.device, bench.deadline, warm_up=lengths[0]
    )
    return generation.steady(min(SETTLING_STEPS, workload.longest // 4))


def steady_attention(workload: Workload, window: Window) -> int:
    """Keys read in a window in which every sequence gets one token a step."""
    count, steps = workload.sequences, window.steps
    first = count * workload.prompt_len + window.tokens_before
    return steps * first + count * steps * (steps - 1) // 2


def _idle(window: Window) -> dict[str, float]:
    return {} if window.idle_share is None else {"idle_share": window.idle_share}


def idle_case(
    shelf: ModelShelf, name: str, batch: int, *, prompt_len: int, new_tokens: int
) -> Case:
    """Share of the decode time in which no graph runs on the device; the smallest model, whose
    steps leave the host the least time."""
    workload = Workload(
        groups=max(batch // 8, 1),
        group_size=min(batch, 8),
        prompt_len=prompt_len,
        longest=new_tokens,
        shortest=new_tokens,
    )
    return Case(
        work="decode step",
        shape={"model": name, **workload.shape},
        run=partial(_idle_share, shelf, name, workload),
    )


def _idle_share(shelf: ModelShelf, name: str, workload: Workload, bench: Bench) -> dict[str, Any]:
    with shelf.patched(name, bench.device) as model:
        window = steady_window(model, workload, bench)
    if window.idle_share is None and bench.device.type == "cuda":
        raise RuntimeError("no CUDA graph was replayed: decoding did not run through graphs")
    return {
        "ours_us": window.step_seconds * 1e6,
        "tokens_per_second": {"ours": window.tokens_per_second},
        "figures": _idle(window),
    }


def long_context_case(
    shelf: ModelShelf, name: str, long: int, short: int, *, new_tokens: int
) -> Case:
    """Time of a token of one sequence behind `long` tokens, over that behind `short` ones."""
    return Case(
        work="one sequence",
        shape={"model": name, "long": long, "short": short, "new_tokens": new_tokens},
        run=partial(_long_context, shelf, name, long, short, new_tokens),
    )


def _long_context(
    shelf: ModelShelf, name: str, long: int, short: int, new_tokens: int, bench: Bench
) -> dict[str, Any]:
    seconds = {}
    with shelf.patched(name, bench.device) as model:
        for length in (short, long):
            workload = Workload(
                groups=1,
                group_size=1,
                prompt_len=length - new_tokens,
                longest=new_tokens,
                shortest=new_tokens,
            )
            window = steady_window(model, workload, bench)
            seconds[length] = window.step_seconds
    return {
        "ours_us": seconds[long] * 1e6,
        "tokens_per_second": {"ours": 1 / seconds[long]},
        "figures": {
            "short_us": seconds[short] * 1e6,
            "times_short": seconds[long] / seconds[short],
        },
    }
