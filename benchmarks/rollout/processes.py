"""New processes with caches of their own: the first token, and `rl-consistency tune` of a policy.

`python -m benchmarks.rollout.processes MODEL SIZES ANSWER` is one process of the former; it writes
a file of JSON. Its time runs from building the engine, the model being there, to the first token
known.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import build_model, model_config
from benchmarks.rollout.child import run_child
from benchmarks.rollout.workload import Workload
from benchmarks.timing import Machine
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

MODEL = "qwen2.5-1.5b"
WORK = Workload.equal(8, 8, 500, 32)
"""500 is no multiple of a block: a prompt that is known leaves a few tokens to compute."""

TUNED = re.compile(r"(\d+) of (\d+) works, \d+ of them known, (\d+) with a faster schedule")
"""The last line of `rl-consistency tune`."""


def cold_start(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Seconds to the first token of two processes that share caches, empty before the first.
    RuntimeError with its messages if one fails."""
    figures: dict[str, Any] = {}
    sizes = (workload.groups, workload.group_size, workload.prompt_len, workload.longest)
    with tempfile.TemporaryDirectory() as caches:
        for state in ("cold", "warm"):
            answer = Path(caches, f"{state}.json")
            given = [name, *map(str, sizes), str(answer), "--device", str(bench.device)]
            child = run_child(
                f"the {state} start",
                ["-m", "benchmarks.rollout.processes", *given],
                empty_caches(caches),
                answer,
            ).require()
            found = child.answer | {"process_seconds": child.seconds}
            figures |= {f"{state}/{key}": value for key, value in found.items()}
    return {"ours_us": 1e6 * figures["cold/first_token_seconds"], "figures": figures}


def tune_policy(bench: Machine, model: str) -> dict[str, Any]:
    """Seconds of `rl-consistency tune` at its defaults, compilation and start included, and what it
    found. RuntimeError with its messages if it fails."""
    with tempfile.TemporaryDirectory() as place:
        config = model_config(model)
        config.dtype = "bfloat16"
        config.save_pretrained(f"{place}/model")
        command = ["-m", "rl_consistency", "tune", "--model", f"{place}/model"]
        command += ["--device", str(bench.device)]
        child = run_child("tune", command, empty_caches(place), Path(place, "none")).require()
    if (found := TUNED.search(child.printed)) is None:
        raise RuntimeError(f"tune ended without its last line:\n{child.printed[-2000:]}")
    counts = zip(("works", "of_works", "faster"), map(int, found.groups()), strict=True)
    figures = {"tune_seconds": child.seconds, **dict(counts)}
    return {"ours_us": 1e6 * child.seconds, "figures": figures}


def empty_caches(folder: str) -> dict[str, str]:
    """An environment in which kernels and findings are kept in a folder, and lines are not cut."""
    own = Path(folder, "own")
    own.mkdir(mode=0o700, exist_ok=True)
    return {"TRITON_CACHE_DIR": f"{folder}/triton", CACHE_VARIABLE: str(own), "COLUMNS": "400"}


def first_tokens(name: str, workload: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of a new process to its first token, and for two rollouts after it."""
    model: Any = build_model(name, device)
    prompts = workload.prompts("cold start", model.config.vocab_size)
    sampling = SamplingParams(max_tokens=workload.longest, ignore_eos=True)
    seconds: dict[str, float] = {}
    with patch(model):
        began = finished_seconds(device)
        blocks = workload.kv_blocks(16)
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=blocks, quiet=True)
        seconds["engine_seconds"] = time.perf_counter() - began
        seconds["first_token_seconds"] = _first_token(engine, prompts, sampling, began)
        seconds["to_first_rollout_seconds"] = time.perf_counter() - began
        # The same prompts again: all but the end of each comes out of the prefix cache.
        for again in ("known_prompts_seconds", "warmed_seconds"):
            seconds[again] = _first_token(engine, prompts, sampling, time.perf_counter())
        began = time.perf_counter()
        engine.warm_up(sampling)
        seconds["warm_up_seconds"] = time.perf_counter() - began
    return seconds


def _first_token(engine: RolloutEngine, prompts: Any, sampling: Any, began: float) -> float:
    """Seconds from `began` to the first token of a `generate`."""
    found: list[float] = []

    def progress(tokens: int, finished: int, total: int) -> None:
        if tokens and not found:
            found.append(time.perf_counter() - began)

    engine.generate(prompts, sampling, progress=progress)
    return found[0]


def main() -> None:
    """Write one process's figures."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("sizes", type=int, nargs=4)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    workload, device = Workload.equal(*args.sizes), torch.device(args.device)
    args.answer.write_text(json.dumps(first_tokens(args.model, workload, device)), "utf-8")


if __name__ == "__main__":
    main()
