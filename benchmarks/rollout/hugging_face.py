"""Generation by Hugging Face at the same prompts and lengths.

`generate` runs eagerly with a dynamic and with a static cache, without compiling; the faster of the
two counts. All completions are as long, which spares it padding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.models import build_model
from benchmarks.rollout.generation import (
    engine_for,
    patched_model,
    release_memory,
    timed_generation,
)
from benchmarks.rollout.workload import Workload, requests
from benchmarks.timing import UNAVAILABLE, Machine, against_stock, library_defaults, reason
from rl_consistency.numerics.clock import finished_seconds

FLASH_ATTENTION = ("flash_attn", "flash_attn_interface")
"""Modules that generate_batch prefers to SDPA."""

Way = Callable[[Any, Workload, Machine], float]
"""Seconds of a stock model for all new tokens of a workload."""


def hugging_face(
    name: str, workload: Workload, ways: Mapping[str, Way], bench: Machine
) -> dict[str, Any]:
    """Seconds of ours, prefill included, against the best of Hugging Face's; times are of a token.
    RuntimeError where none of its ways ran."""
    with patched_model(name, bench.device) as model:
        engine, sampling = engine_for(model, workload), requests(workload.lengths())
        for run in ("capture", "measure"):
            prompts = workload.prompts(run, model.config.vocab_size)
            ours = timed_generation(engine, prompts, sampling, bench).seconds
    release_memory()
    model = build_model(name, bench.device)
    seconds, unavailable = {}, {}
    for way, run in ways.items():
        try:
            with library_defaults():
                seconds[way] = run(model, workload, bench)
        except UNAVAILABLE as error:
            unavailable[way] = reason(error)
        release_memory()
    if not seconds:
        raise RuntimeError(f"no way of Hugging Face's ran: {unavailable}")
    best, tokens = min(seconds, key=lambda way: seconds[way]), sum(workload.lengths())
    fields = against_stock(ours / tokens, seconds[best] / tokens, best, 1)
    peers = {way: 1e6 * each / tokens for way, each in seconds.items()}
    return fields | {"peers": peers, "unavailable": unavailable}


def generate(model: Any, workload: Workload, bench: Machine, *, cache: str | None) -> float:
    """`generate` with a cache implementation; None is the dynamic one."""
    ids = torch.tensor(workload.prompts("measure", model.config.vocab_size), device=bench.device)
    seconds = 0.0
    for new_tokens in (2, workload.longest):  # the first is a warm-up
        model.generation_config = _generation_config(new_tokens, cache)
        started = finished_seconds(bench.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        seconds = finished_seconds(bench.device) - started
        if out.shape != (len(ids), ids.shape[1] + new_tokens):
            raise RuntimeError(f"generate gave {tuple(out.shape)}, not all the tokens asked for")
    return seconds


def generate_batch(model: Any, workload: Workload, bench: Machine) -> float:
    """`generate_batch`, from the first request's start to the last one's end: what it allocates and
    captures before is not counted."""
    prompts = workload.prompts("measure", model.config.vocab_size)
    model.generation_config = config = _generation_config(workload.longest, None)
    if not any(importlib.util.find_spec(module) for module in FLASH_ATTENTION):
        model.set_attn_implementation("paged|sdpa")  # else it may look for a kernel to download
    outputs = list(model.generate_batch(prompts, generation_config=config).values())
    tokens = sum(len(output.generated_tokens) for output in outputs)
    if tokens != workload.sequences * workload.longest:
        errors = {str(output.error) for output in outputs if output.error}
        raise RuntimeError(f"generate_batch gave {tokens} tokens, not all: {'; '.join(errors)}")
    starts, ends = zip(*(output.lifespan for output in outputs), strict=True)
    return max(ends) - min(starts)


def _generation_config(new_tokens: int, cache: str | None) -> GenerationConfig:
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    length = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    return GenerationConfig(**drawn, **length, cache_implementation=cache, disable_compile=True)


GENERATE: dict[str, Way] = {
    "generate, dynamic cache": partial(generate, cache=None),
    "generate, static cache": partial(generate, cache="static"),
}
GENERATE_BATCH: dict[str, Way] = {"generate_batch": generate_batch}
