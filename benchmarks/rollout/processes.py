"""New processes with caches of their own: the seconds to a first token.

`python -m benchmarks.rollout.processes MODEL DEVICE SIZES` is one of them; its last line is JSON.
Its time runs from building the engine, the model being there, to the first token known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import build_model
from benchmarks.rollout.workload import Workload
from benchmarks.timing import Machine
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.engine import RolloutEngine

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 900
"""A process that takes longer is killed, with those that it started."""


def run_child(
    name: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, float, str]:
    """Run `python arguments` in the clone, which is on the path whatever this process was started
    with. What it printed, its seconds, and how it failed: empty where it did not."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), **environment}
    # `timeout` also ends the processes that an engine started.
    command = ["timeout", "--signal=KILL", str(LONGEST_SECONDS), sys.executable, *arguments]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    seconds, failure = time.perf_counter() - began, ""
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        failure = f"{name} ended with status {done.returncode}: {last[:200]}"
    return done.stdout, seconds, failure


def cold_start(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Seconds to the first token of two processes that share caches, empty before the first.
    RuntimeError with its messages if one fails."""
    figures: dict[str, Any] = {}
    sizes = (workload.groups, workload.group_size, workload.prompt_len, workload.longest)
    command = ["-m", "benchmarks.rollout.processes", name, str(bench.device), *map(str, sizes)]
    with tempfile.TemporaryDirectory() as caches:
        (own := Path(caches, "own")).mkdir(mode=0o700)
        environment = {"TRITON_CACHE_DIR": f"{caches}/triton", CACHE_VARIABLE: str(own)}
        for state in ("cold", "warm"):
            printed, seconds, failure = run_child(f"the {state} start", command, environment)
            if failure:
                raise RuntimeError(f"{failure}\n\n{printed[-2000:]}")
            found = json.loads(printed.splitlines()[-1]) | {"process_seconds": seconds}
            figures |= {f"{state}/{key}": value for key, value in found.items()}
    return {"ours_us": 1e6 * figures["cold/first_token_seconds"], "figures": figures}


def first_tokens(name: str, workload: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of a new process to its first token, and for two rollouts after it."""
    model: Any = build_model(name, device)
    prompts = workload.prompts("cold start", model.config.vocab_size)
    sampling = workload.requests()
    seconds: dict[str, float] = {}

    def first_token(began: float) -> float:
        known: list[float] = []

        def progress(tokens: int, finished: int, total: int) -> None:
            known.extend([time.perf_counter() - began] if tokens else [])

        engine.generate(prompts, sampling, progress=progress)
        return known[0]

    with patch(model):
        began = finished_seconds(device)
        blocks = workload.kv_blocks(16)
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=blocks, quiet=True)
        seconds["engine_seconds"] = time.perf_counter() - began
        seconds["first_token_seconds"] = first_token(began)
        seconds["to_first_rollout_seconds"] = time.perf_counter() - began
        # The same prompts again: all but the end of each comes out of the prefix cache.
        for again in ("known_prompts_seconds", "warmed_seconds"):
            seconds[again] = first_token(time.perf_counter())
        began = time.perf_counter()
        engine.warm_up(sampling[0])
        seconds["warm_up_seconds"] = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    model, where, *numbers = sys.argv[1:]
    print(json.dumps(first_tokens(model, Workload.equal(*map(int, numbers)), torch.device(where))))
