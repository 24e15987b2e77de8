"""vLLM with the plug-in beside vLLM as it comes and beside our own engine, a process each.

All get the same checkpoint, prompts and lengths, prefix caching, and return logprobs. vLLM has its
defaults but for `max_model_len` and `max_num_seqs`; the network is away. Every process is started
twice: first all at once, to fill the caches on disk, then one after the other, to be measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.make_random_model import main as make_random_model
from benchmarks.models import model_config
from benchmarks.rollout import plugin_process
from benchmarks.rollout.engines import ENVIRONMENT, KV_BLOCK, MAX_NUM_SEQS
from benchmarks.rollout.processes import run_child
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.suite import Case, Choice, Suites
from benchmarks.timing import Machine, row_fields, taken_bytes

MODELS = ("qwen3-0.6b", "qwen3-8b")
MODES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vllm": ("vllm", {"RL_CONSISTENCY_VLLM": "0"}),
    "ours": ("vllm", {"RL_CONSISTENCY_VLLM": "1"}),
    "own engine": ("ours", {}),
}
"""Name in a row -> the engine of the process, and its environment. `ours` is the plug-in."""

MAX_MODEL_LEN = 4096
WORKS = (
    Workload.equal(256, 1, 512, 1),
    Workload.equal(256, 1, 512, 128),
    Workload.equal(1, 1, 512, 256),
    Workload.equal(16, 16, 512, 2048),
)
QUICK_WORKS = (*WORKS[:3], Workload.equal(16, 16, 512, 512))
TINY_WORKS = (Workload.equal(2, 1, 12, 1), Workload.equal(2, 2, 12, 6))


def plugin_suites(choice: Choice) -> Suites:
    """A suite of each model, which is a directory or a name of `benchmarks.models`. ValueError on
    an unknown one."""
    works = TINY_WORKS if choice.tiny else QUICK_WORKS if choice.quick else WORKS
    models = choice.models or (["tiny-qwen3"] if choice.tiny else MODELS)
    runs = ("warm", *("01" if choice.quick else "012"))
    return {f"vllm_{Path(model).name}": plugin_cases(model, works, runs) for model in models}


def plugin_cases(model: str, works: Sequence[Workload], runs: Sequence[str]) -> list[Case]:
    """A row of each work, of the start and of the weights, with all engines."""
    folder = Path(model)
    if not folder.is_dir():
        model_config(model)

    @cache  # all is measured once the first row is asked for
    def answers(device: torch.device) -> dict[str, dict[str, Any]]:
        taken_bytes(device)
        with TemporaryDirectory() as place:
            if folder.is_dir():
                return engine_answers(folder, works, runs, device)
            made = Path(place, "model")
            make_random_model(["--preset", model, "--device", str(device), str(made)])
            taken_bytes(device)
            return engine_answers(made, works, runs, device)

    def row(seconds: Callable[[dict[str, Any]], float], tokens: int, bench: Machine) -> Any:
        """RuntimeError, saying why, where the plug-in was not measured."""
        times, unavailable = {}, {}
        for name, answer in answers(bench.device).items():
            try:
                times[name] = seconds(answer)
            except LookupError:
                # Our own engine reads the trainer's weights, so that it has none to load.
                unavailable |= {name: answer["failure"]} if answer["failure"] else {}
        if "ours" not in times:
            raise RuntimeError(unavailable.get("ours", "nothing was measured"))
        return row_fields(times, ["vllm"], tokens=tokens) | {"unavailable": unavailable}

    shape = {"model": folder.name}
    found = [Case(work="ready to serve", shape=shape, run=partial(row, lambda a: a["ready"], 0))]
    for place, work in enumerate(works):
        name, tokens = "generate", sum(work.lengths())
        if work.longest == 1:
            name, tokens = "prefill", work.sequences * work.prompt_len

        def seconds(answer: dict[str, Any], place: int = place) -> float:
            return median(answer["works"][place])

        run = partial(row, seconds, tokens)
        found.append(Case(work=name, shape=shape | work.shape, run=run))
    load = partial(row, lambda answer: answer["load"], 0)
    return [*found, Case(work="weights", shape=shape, run=load)]


def engine_answers(
    folder: Path, works: Sequence[Workload], runs: Sequence[str], device: torch.device
) -> dict[str, dict[str, Any]]:
    """What the process of each mode measured, and its `failure`."""
    given = folder, works, runs, device
    with ThreadPoolExecutor(len(MODES)) as pool:
        filling = pool.map(lambda mode: engine_answer(mode, *given, fill=True), MODES)
        for mode, answer in zip(MODES, filling):
            print(f"  caches of {mode}: {json.dumps(answer)}", flush=True)
    found = {}
    for mode in MODES:
        found[mode] = engine_answer(mode, *given)
        print(f"  {mode}: {json.dumps(found[mode])}", flush=True)
    return found


def engine_answer(
    mode: str, folder: Path, works: Sequence[Workload], runs: Sequence[str], device: torch.device,
    *, fill: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What one process measured; to fill the caches, only the seconds until it was ready."""
    engine, environment = MODES[mode]
    config = AutoConfig.from_pretrained(folder)
    longest = max(work.prompt_len + work.longest for work in works) + TOKENS_BEYOND
    # Processes that fill the caches share the GPU.
    small = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    settings = {
        "engine": engine,
        "model": str(folder.resolve()),
        "device": str(device),
        "fill": fill,
        "max_model_len": min(MAX_MODEL_LEN, config.max_position_embeddings),
        "max_num_seqs": MAX_NUM_SEQS,
        "longest": longest,
        "kv_blocks": 1024 if fill else MAX_NUM_SEQS * -(-longest // KV_BLOCK),
        "vllm": small if fill else {},
        "works": [
            {
                "new_tokens": work.lengths(),
                "runs": [work.prompts(run, config.vocab_size) for run in runs],
            }
            for work in works
        ],
    }
    with TemporaryDirectory() as place:
        file, answer = Path(place, "settings.json"), Path(place, "answer.json")
        file.write_text(json.dumps(settings | {"began": time.time()}), "utf-8")
        command = ["-u", "-P", plugin_process.__file__, str(file), str(answer)]
        printed, _, failure = run_child(mode, command, {**ENVIRONMENT, **environment})
        found = json.loads(answer.read_text("utf-8")) if answer.exists() else {"works": []}
    if failure:
        print(printed[-5000:], file=sys.stderr, flush=True)
    return found | {"failure": failure}
