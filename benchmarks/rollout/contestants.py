"""The engines that are held side by side: how each is started, and on which model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.models import model_config
from benchmarks.rollout import engine_child

ROOT = Path(__file__).resolve().parents[2]
OURS, DEFAULTS, INVARIANT = "ours", "vllm", "vllm batch-invariant"
MODES = {"defaults": DEFAULTS, "invariant": INVARIANT}
"""What `--against` names."""
KV_BLOCK = 16
"""Tokens of a block of the cache, in both engines' defaults."""

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment of vLLM's processes: no network, and no kernels that are compiled by a CUDA
toolkit."""


@dataclass(frozen=True)
class Way:
    """One engine in one mode."""

    name: str
    command: tuple[str, ...]
    """The child's folder comes behind it."""
    environment: Mapping[str, str]


def ways(site: Path, modes: Sequence[str]) -> list[Way]:
    """Ours, then vLLM in some modes; ValueError on a folder without vLLM and on unknown modes."""
    if not (site / "vllm" / "__init__.py").is_file():
        raise ValueError(
            f"--vllm {site}: no folder `vllm` with a package is in it; give the site-packages "
            "folder into which vLLM was unpacked or installed."
        )
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"--against {','.join(unknown)}: give some of {', '.join(MODES)}.")
    python = (sys.executable, "-u", "-P", str(Path(engine_child.__file__).resolve()))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = [Way(OURS, (*python, "ours"), {"PYTHONPATH": os.pathsep.join(paths)})]
    libraries = filter(None, [os.environ.get("LD_LIBRARY_PATH"), "/usr/local/nvidia/lib64"])
    theirs = ENVIRONMENT | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": str(site.resolve()),
        "VLLM_CACHE_ROOT": str(site.resolve() / ".cache"),
    }
    for mode in dict.fromkeys(modes):
        flag = {"VLLM_BATCH_INVARIANT": "1" if mode == "invariant" else "0"}
        found.append(Way(MODES[mode], (*python, "vllm"), theirs | flag))
    return found


def save_config(name: str, folder: Path) -> Any:
    """Write the configuration of a model of the benches where both sides read it."""
    config = model_config(name)
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    config.architectures = [classes[type(config)].__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return config


def kv_cache_size(config: Any, sequences: int, length: int) -> dict[str, int]:
    """The cache that every engine gets, in blocks of ours and in bytes of bf16: so many sequences,
    with a little room behind each."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    tokens = max(sequences * (length + 32), engine_child.MAX_MODEL_LEN)
    blocks = int(1.02 * tokens) // KV_BLOCK
    return {"num_kv_blocks": blocks, "kv_cache_memory_bytes": blocks * KV_BLOCK * per_token}
