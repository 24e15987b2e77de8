"""A small model, which every test builds for itself. Processes of tests share the cores that
compile kernels, and the GPU's memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.compile_ahead import use_workers
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.kernels.matmul import audit

SIZES = {
    "vocab_size": 331,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}

MOST_KEPT = 1 << 30
"""Bytes that a process may keep from test to test."""


@pytest.fixture(scope="session", autouse=True)
def share_cores():
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        use_workers(max(1, 2 * len(os.sched_getaffinity(0)) // processes))


@pytest.fixture(autouse=True)
def share_memory(request, tmp_path_factory) -> Iterator[None]:
    """Large tests, of up to 34 GiB, take turns. None keeps memory that the allocator has cached."""
    with (tmp_path_factory.getbasetemp().parent / "turn of large tests").open("w") as file:
        if request.node.get_closest_marker("large"):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()


@pytest.fixture
def fresh_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No certificate or winner of this machine is read, none of a test is left on it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(findings_module, "_by_device", {})
    monkeypatch.setattr(audit, "_counts", audit._Counts())


@pytest.fixture(scope="session")
def small_model() -> Callable[..., nn.Module]:
    """Builds a small stock model on the GPU, the same weights each time; changes to its config by
    name."""

    def build(
        dtype: torch.dtype = torch.bfloat16, family: str = "qwen3", **changes: Any
    ) -> nn.Module:
        config = AutoConfig.for_model(family, **SIZES | changes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.to(device="cuda", dtype=dtype)

    return build
