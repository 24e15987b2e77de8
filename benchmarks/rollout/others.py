"""Generation by Hugging Face, and by vLLM where it is installed, at the same prompts and lengths.

Hugging Face's `generate` runs eagerly with a dynamic and with a static cache, without compiling;
the faster of the two counts. All completions are as long, which spares it padding. vLLM runs in a
process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.results import VLLM
from benchmarks.rollout.generation import engine_for, timed_generation
from benchmarks.rollout.models import ModelShelf, release_memory
from benchmarks.rollout.workload import Workload, requests
from benchmarks.suite import OutOfTime
from benchmarks.timing import UNAVAILABLE, Machine, library_defaults
from rl_consistency.numerics.clock import finished_seconds

FLASH_ATTENTION = ("flash_attn", "flash_attn_interface")
"""Modules that generate_batch prefers to SDPA."""

VLLM_SECONDS = 600
"""Longest that one vLLM process may take, compiling included."""

Rate = Callable[[Any, Workload, Machine], float]
"""New tokens per second of a stock model on a workload."""


def hugging_face(
    shelf: ModelShelf, name: str, workload: Workload, ways: dict[str, Rate], bench: Machine
) -> dict[str, Any]:
    """New tokens per second of ours over the best of Hugging Face's ways."""
    ours = our_rate(shelf, name, workload, bench)
    model = shelf.model(name, bench.device)
    rates, unavailable = {}, {}
    try:
        for way, rate in ways.items():
            if bench.deadline is not None and time.perf_counter() > bench.deadline:
                raise OutOfTime
            try:
                with library_defaults():
                    rates[way] = rate(model, workload, bench)
            except UNAVAILABLE as error:
                unavailable[way] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            release_memory(bench.device)
    finally:
        del model
        shelf.clear(bench.device)  # generate_batch leaves another attention behind
    return _fields(ours, rates, unavailable)


def _fields(ours: float, rates: dict[str, float], unavailable: dict[str, str]) -> dict[str, Any]:
    """The fields of a row from new tokens per second; its times are those of one new token."""
    best = max(rates, key=lambda way: rates[way], default=None)
    return {
        "ours_us": 1e6 / ours,
        "stock_us": None if best is None else 1e6 / rates[best],
        "stock": best,
        "peers": {way: 1e6 / rate for way, rate in rates.items()},
        "ratio": None if best is None else ours / rates[best],
        "tokens_per_second": {"ours": ours, **rates},
        "unavailable": unavailable,
    }


def our_rate(shelf: ModelShelf, name: str, workload: Workload, bench: Machine) -> float:
    """New tokens per second of our engine, prefill included."""
    with shelf.patched(name, bench.device) as model:
        engine, sampling = engine_for(model, workload), requests(workload.lengths())
        for run in ("capture", "measure"):
            prompts = workload.prompts(run, model.config.vocab_size)
            generation = timed_generation(engine, prompts, sampling, bench)
    return generation.new_tokens_per_second


def generate_rate(model: Any, workload: Workload, bench: Machine, *, cache: str | None) -> float:
    """`generate` with a cache implementation; None is the dynamic one."""
    ids = torch.tensor(workload.prompts("measure", model.config.vocab_size), device=bench.device)
    for new_tokens in (2, workload.longest):  # the first is a warm-up
        model.generation_config = _generation_config(new_tokens, cache)
        started = finished_seconds(bench.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        seconds = finished_seconds(bench.device) - started
        if out.shape != (len(ids), ids.shape[1] + new_tokens):
            raise RuntimeError(f"generate gave {tuple(out.shape)}, not all the tokens asked for")
    return workload.sequences * workload.longest / seconds


def generate_batch_rate(model: Any, workload: Workload, bench: Machine) -> float:
    """`generate_batch`, from the first request's start to the last one's end: what it allocates and
    captures before is not counted."""
    prompts = workload.prompts("measure", model.config.vocab_size)
    model.generation_config = config = _generation_config(workload.longest, None)
    if not any(importlib.util.find_spec(module) for module in FLASH_ATTENTION):
        model.set_attn_implementation("paged|sdpa")  # else it may look for a kernel to download
    outputs = list(model.generate_batch(prompts, generation_config=config).values())
    tokens, expected = (
        sum(len(o.generated_tokens) for o in outputs),
        workload.sequences * workload.longest,
    )
    if tokens != expected:
        errors = "; ".join(sorted({str(output.error) for output in outputs if output.error}))
        raise RuntimeError(f"generate_batch gave {tokens} of {expected} tokens {errors}")
    spans = [output.lifespan for output in outputs]
    return tokens / (max(end for _, end in spans) - min(start for start, _ in spans))


def _generation_config(new_tokens: int, cache: str | None) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
    )


GENERATE: dict[str, Rate] = {
    "generate, dynamic cache": partial(generate_rate, cache=None),
    "generate, static cache": partial(generate_rate, cache="static"),
}
GENERATE_BATCH: dict[str, Rate] = {"generate_batch": generate_batch_rate}


def public_engines(
    shelf: ModelShelf, name: str, workload: Workload, bench: Machine
) -> dict[str, Any]:
    """New tokens per second of ours over those of vLLM, also in its batch-invariant mode."""
    if importlib.util.find_spec("vllm") is None:
        return {"unavailable": {"vllm": "not installed"}}
    ours = our_rate(shelf, name, workload, bench)
    rates, unavailable = {}, {}
    with TemporaryDirectory() as directory:
        model = shelf.model(name, bench.device)
        model.save_pretrained(directory)
        prompts = workload.prompts("measure", model.config.vocab_size)
        del model
        shelf.clear(bench.device)
        for way in ("vllm", VLLM):
            try:
                rates[way] = vllm_rate(Path(directory), prompts, workload.longest, way == VLLM)
            except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
                unavailable[way] = f"{type(error).__name__}: {error}"[:200]
    return _fields(ours, rates, unavailable)


def vllm_rate(
    directory: Path, prompts: list[list[int]], new_tokens: int, batch_invariant: bool
) -> float:
    """New tokens per second of `benchmarks.rollout.vllm` in a process of its own.

    Raises:
        RuntimeError: the process failed; its last line says how.
        subprocess.TimeoutExpired: it took too long.
    """
    work = directory / "prompts.json"
    work.write_text(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.rollout.vllm", str(directory)]
    command += ["--batch-invariant"] if batch_invariant else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=VLLM_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return float(json.loads(done.stdout.splitlines()[-1])["new_tokens_per_second"])
