"""Generation by others at the same prompts and lengths: Hugging Face, and public engines.

Hugging Face's `generate` runs eagerly with a dynamic and with a static cache, without compiling;
the faster of the two counts. All completions are as long, which spares it padding. What a public
engine takes is measured in a process of its own.
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

from benchmarks.rollout.cases import engine_for
from benchmarks.rollout.measure import release_memory, timed_generation
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.workload import Workload, requests
from benchmarks.suite import Bench, Case, OutOfTime
from benchmarks.timing import UNAVAILABLE, library_defaults
from rl_consistency.numerics.clock import finished_seconds

ENGINES = {"vllm": "vllm", "sglang": "sglang", "nano-vllm": "nanovllm"}
"""Public engine to module."""

FLASH_ATTENTION = ("flash_attn", "flash_attn_interface")
"""Modules that generate_batch prefers to SDPA."""

BATCH_INVARIANT = "vllm batch-invariant"
VLLM_SECONDS = 600
"""Longest that one vLLM process may take, compiling included."""

Rate = Callable[[Any, Workload, Bench], float]
"""New tokens per second of a stock model on a workload."""


def hugging_face_case(
    shelf: ModelShelf, name: str, workload: Workload, work: str, ways: dict[str, Rate]
) -> Case:
    """New tokens per second of ours over the best of Hugging Face's ways."""
    return Case(
        work=work,
        shape={"model": name, **workload.shape},
        run=partial(_hugging_face, shelf, name, workload, ways),
    )


def _hugging_face(
    shelf: ModelShelf, name: str, workload: Workload, ways: dict[str, Rate], bench: Bench
) -> dict[str, Any]:
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


def our_rate(shelf: ModelShelf, name: str, workload: Workload, bench: Bench) -> float:
    """New tokens per second of our engine, prefill included."""
    with shelf.patched(name, bench.device) as model:
        engine = engine_for(model, workload)
        for run in ("capture", "measure"):
            generation = timed_generation(
                engine,
                workload.prompts(run, model.config.vocab_size),
                requests(workload.lengths()),
                bench.device,
                bench.deadline,
            )
    return generation.new_tokens / generation.seconds


def generate_rate(model: Any, workload: Workload, bench: Bench, *, cache: str | None) -> float:
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


def generate_batch_rate(model: Any, workload: Workload, bench: Bench) -> float:
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
        raise RuntimeError(
            f"generate_batch gave {tokens} of {workload.sequences * workload.longest} tokens "
            f"{'; '.join(sorted(errors))}"
        )
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


def public_engines_case(shelf: ModelShelf, name: str, workload: Workload) -> Case:
    """Public engines beside ours, where they are installed."""
    return Case(
        work="public engines",
        shape={"model": name, **workload.shape},
        run=partial(_public_engines, shelf, name, workload),
    )


def _public_engines(
    shelf: ModelShelf, name: str, workload: Workload, bench: Bench
) -> dict[str, Any]:
    present = {e for e, module in ENGINES.items() if importlib.util.find_spec(module) is not None}
    unavailable = dict.fromkeys((e for e in ENGINES if e not in present), "not installed")
    unavailable |= dict.fromkeys(present - {"vllm"}, "installed; this command does not drive it")
    if "vllm" not in present:
        return {"unavailable": unavailable}
    ours = our_rate(shelf, name, workload, bench)
    rates = {}
    with TemporaryDirectory() as directory:
        model = shelf.model(name, bench.device)
        model.save_pretrained(directory)
        prompts = workload.prompts("measure", model.config.vocab_size)
        del model
        shelf.clear(bench.device)
        for way in ("vllm", BATCH_INVARIANT):
            try:
                rates[way] = vllm_rate(Path(directory), prompts, workload.longest, way)
            except (OSError, RuntimeError, ValueError) as error:
                unavailable[way] = f"{type(error).__name__}: {error}"[:200]
    return _fields(ours, rates, unavailable)


def vllm_rate(directory: Path, prompts: list[list[int]], new_tokens: int, way: str) -> float:
    """New tokens per second of vLLM in a process of its own.

    Raises:
        RuntimeError: the process failed or took too long; its last line says how.
    """
    work = directory / "prompts.json"
    work.write_text(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.rollout.vllm", str(directory)]
    if way == BATCH_INVARIANT:
        command.append("--batch-invariant")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VLLM_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no result after {VLLM_SECONDS} s") from error
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return float(json.loads(done.stdout.splitlines()[-1])["new_tokens_per_second"])
