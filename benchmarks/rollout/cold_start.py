"""The first token of a new process: with empty caches, then with what that process left on disk.

Each process is a fresh one, `python -m benchmarks.rollout.cold_start MODEL`, which prints one line
of JSON. Its time runs from building the engine, the model being there, to the first token known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch as attribute

import torch

from benchmarks.models import build_model
from benchmarks.rollout.workload import Workload
from benchmarks.timing import Machine
from rl_consistency.kernels.core import compile_ahead
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.kernels.matmul import cublaslt
from rl_consistency.models.patch import patch
from rl_consistency.rollout import weights
from rl_consistency.rollout.device import rollout_kernels
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen2.5-1.5b"
WORK = Workload.equal(8, 8, 500, 32)
"""500 is no multiple of a block: a prompt that is known leaves a few tokens to compute."""


def cold_start(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Seconds to the first token of two processes that share caches, empty before the first."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for state in ("cold", "warm"):
            found = process(name, workload, Path(folder), bench.device)
            figures |= {f"{state}/{key}": value for key, value in found.items()}
    return {"ours_us": 1e6 * figures["cold/first_token_seconds"], "figures": figures}


def process(name: str, workload: Workload, caches: Path, device: torch.device) -> dict[str, Any]:
    """What one new process prints; RuntimeError with its messages if it fails."""
    environment = {"TRITON_CACHE_DIR": str(caches / "triton"), CACHE_VARIABLE: str(caches / "own")}
    sizes = (workload.groups, workload.group_size, workload.prompt_len, workload.longest)
    command = [sys.executable, "-m", "benchmarks.rollout.cold_start", name, *map(str, sizes)]
    command += ["--device", str(device)]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    seconds = time.perf_counter() - began
    return json.loads(done.stdout.splitlines()[-1]) | {"process_seconds": seconds}


@contextmanager
def timed(seconds: dict[str, float], phase: str, owner: Any, name: str) -> Iterator[None]:
    """Add the time in a function to a phase."""
    function = getattr(owner, name)
    seconds.setdefault(phase, 0.0)

    def call(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            seconds[phase] += time.perf_counter() - began

    with attribute.object(owner, name, call):
        yield


def first_tokens(name: str, workload: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of each phase of a new process, to its first token and for two rollouts after it."""
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    model: Any = build_model(name, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds["model_seconds"] = time.perf_counter() - began
    prompts = workload.prompts("cold start", model.config.vocab_size)
    sampling = SamplingParams(max_tokens=workload.longest, ignore_eos=True)
    with (
        patch(model),
        timed(seconds, "ahead_seconds", rollout_kernels, "compile_ahead"),
        timed(seconds, "compile_seconds", compile_ahead, "_compile"),
        timed(seconds, "certificate_seconds", cublaslt, "compare"),
        timed(seconds, "graph_seconds", DecodeGraphs, "_capture"),
        timed(seconds, "digest_seconds", weights, "model_digest"),
    ):
        began = time.perf_counter()
        engine = RolloutEngine(
            model, eos_token_id=None, num_kv_blocks=workload.kv_blocks(16), quiet=True
        )
        seconds["engine_seconds"] = time.perf_counter() - began
        seconds["first_token_seconds"] = first_token(engine, prompts, sampling, began)
        seconds["to_first_rollout_seconds"] = time.perf_counter() - began
        # The same prompts again: all but the end of each comes out of the prefix cache.
        for again in ("known_prompts_seconds", "warmed_seconds"):
            seconds[again] = first_token(engine, prompts, sampling, time.perf_counter())
        began = time.perf_counter()
        engine.warm_up(sampling)
        seconds["warm_up_seconds"] = time.perf_counter() - began
    return seconds


def first_token(engine: RolloutEngine, prompts: Any, sampling: Any, began: float) -> float:
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
