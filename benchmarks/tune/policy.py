"""`rl-consistency tune` of a whole policy: a fresh process with empty caches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import model_config
from benchmarks.timing import Machine
from rl_consistency.kernels.core.findings import CACHE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = re.compile(r"(\d+) of (\d+) works, \d+ of them known, (\d+) with a faster schedule")


def tune_policy(bench: Machine, model: str) -> dict[str, Any]:
    """Seconds of the command at its defaults, compilation and start included, and what it found.

    RuntimeError with its messages if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        config = model_config(model)
        config.dtype = "bfloat16"
        config.save_pretrained(directory / "model")
        command = [sys.executable, "-m", "rl_consistency", "tune"]
        command += ["--model", str(directory / "model"), "--device", str(bench.device)]
        caches = {"TRITON_CACHE_DIR": "triton", CACHE_VARIABLE: "own"}
        environment = {name: str(directory / place) for name, place in caches.items()}
        (directory / "own").mkdir(mode=0o700)
        began = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment | {"COLUMNS": "400"},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - began
    found = SUMMARY.search(done.stdout)
    if done.returncode or found is None:
        said = f"{done.stdout}\n{done.stderr}"[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    names = ("works", "of_works", "faster")
    figures: dict[str, Any] = {"tune_seconds": seconds}
    return {
        "ours_us": 1e6 * seconds,
        "figures": figures | dict(zip(names, map(int, found.groups()), strict=True)),
    }
