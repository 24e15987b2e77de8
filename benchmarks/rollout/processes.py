"""New processes with caches of their own: the first token, and `rl-consistency tune` of a policy.

`python -m benchmarks.rollout.processes MODEL SIZES` is one process of the former; it prints a line
of JSON. Its time runs from building the engine, the model being there, to the first token known.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import build_model, model_config
from benchmarks.rollout.workload import Workload
from benchmarks.timing import Machine
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen2.5-1.5b"
WORK = Workload.equal(8, 8, 500, 32)
"""500 is no multiple of a block: a prompt that is known leaves a few tokens to compute."""

TUNED = re.compile(r"(\d+) of (\d+) works, \d+ of them known, (\d+) with a faster schedule")
"""The last line of `rl-consistency tune`."""


def cold_start(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Seconds to the first token of two processes that share caches, empty before the first."""
    figures: dict[str, Any] = {}
    sizes = (workload.groups, workload.group_size, workload.prompt_len, workload.longest)
    command = ["benchmarks.rollout.processes", name, *map(str, sizes), "--device"]
    with tempfile.TemporaryDirectory() as caches:
        for state in ("cold", "warm"):
            printed, seconds = process([*command, str(bench.device)], caches)
            found = json.loads(printed.splitlines()[-1]) | {"process_seconds": seconds}
            figures |= {f"{state}/{key}": value for key, value in found.items()}
    return {"ours_us": 1e6 * figures["cold/first_token_seconds"], "figures": figures}


def tune_policy(bench: Machine, model: str) -> dict[str, Any]:
    """Seconds of `rl-consistency tune` at its defaults, compilation and start included, and what it
    found. RuntimeError with its messages if it fails."""
    with tempfile.TemporaryDirectory() as place:
        config = model_config(model)
        config.dtype = "bfloat16"
        config.save_pretrained(f"{place}/model")
        command = ["rl_consistency", "tune", "--model", f"{place}/model", "--device"]
        printed, seconds = process([*command, str(bench.device)], place)
    if (found := TUNED.search(printed)) is None:
        raise RuntimeError(f"tune ended without its last line:\n{printed[-2000:]}")
    counts = zip(("works", "of_works", "faster"), map(int, found.groups()), strict=True)
    return {"ours_us": 1e6 * seconds, "figures": {"tune_seconds": seconds, **dict(counts)}}


def process(arguments: Sequence[str], caches: str) -> tuple[str, float]:
    """What `python -m arguments` prints with caches in a folder, and its seconds; RuntimeError with
    its messages if it fails."""
    own = Path(caches, "own")
    own.mkdir(mode=0o700, exist_ok=True)
    places = {"TRITON_CACHE_DIR": f"{caches}/triton", CACHE_VARIABLE: str(own), "COLUMNS": "400"}
    command = [sys.executable, "-m", *arguments]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True
    )
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}"[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout, time.perf_counter() - began


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
    """One process's figures on standard output."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("sizes", type=int, nargs=4)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    workload, device = Workload.equal(*args.sizes), torch.device(args.device)
    print(json.dumps(first_tokens(args.model, workload, device)))


if __name__ == "__main__":
    main()
