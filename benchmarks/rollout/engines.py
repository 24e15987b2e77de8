"""Our engine beside Hugging Face's `generate` and vLLM on the same model and work: one after the
other, a process each.

All get the same configuration of the model, weights N(0, 0.02), prompts and lengths; ours and vLLM
return logprobs and have a cache of one size. Ours has the defaults of `RolloutEngine` but for that
and `max_num_seqs`; what vLLM is given is in engine_process.py and below. Times are medians of whole
calls on the host's clock, prefill included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.models import model_config
from benchmarks.rollout import engine_process
from benchmarks.rollout.processes import run_child
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.suite import Case, Choice, Suites
from benchmarks.timing import Machine, row_fields, taken_bytes

MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b")
MODES = {"defaults": "vllm", "invariant": "vllm batch-invariant"}
"""What `--against` names -> the name in a row."""
HUGGING_FACE = ("dynamic", "static")
"""The caches of Hugging Face's `generate`."""

WORKS = (
    Workload.equal(256, 1, 512, 128),
    Workload.equal(256, 1, 512, 1),
    # More sequences than run at a time, of many lengths: prompts join those that decode.
    Workload(640, 1, 128, longest=256, shortest=20),
    Workload.equal(1, 1, 512, 256),
    Workload.equal(256, 1, 512, 1024),
)
TINY_WORKS = (Workload.equal(2, 1, 12, 6), Workload(6, 1, 16, longest=16, shortest=2))
MAX_NUM_SEQS, KV_BLOCK, MAX_MODEL_LEN = 256, 16, 2048

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

Engines = Mapping[str, tuple[str, Mapping[str, str]]]
"""Name in a row -> the engine of the process, and its environment."""


def vllm_suites(choice: Choice) -> Suites:
    """A suite of each model. ValueError on a folder without vLLM, on unknown models and modes."""
    site, modes = choice.vllm, choice.against or tuple(MODES)
    if site is None or not (site / "vllm" / "__init__.py").is_file():
        raise ValueError(
            f"--vllm {site}: no folder `vllm` with a package is in it; give the site-packages "
            "folder into which vLLM was unpacked or installed."
        )
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"--against {','.join(unknown)}: give some of {', '.join(MODES)}.")
    libraries = filter(None, [os.environ.get("LD_LIBRARY_PATH"), "/usr/local/nvidia/lib64"])
    environment = ENVIRONMENT | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": str(site.resolve()),
        "VLLM_CACHE_ROOT": str(site.resolve() / ".cache"),
    }
    engines = {
        MODES[mode]: ("vllm", environment | {"VLLM_BATCH_INVARIANT": str(int(mode == "invariant"))})
        for mode in modes
    }
    models = choice.models or (["tiny-qwen3"] if choice.tiny else MODELS)
    works = TINY_WORKS if choice.tiny else WORKS
    return {f"rollout_vllm_{model}": beside(engines, model, works) for model in models}


def hugging_face_cases(model: str, work: Workload) -> list[Case]:
    """Ours against Hugging Face's `generate`; the faster cache counts."""
    return beside(
        {f"generate, {cache} cache": (cache, {}) for cache in HUGGING_FACE}, model, [work]
    )


def beside(engines: Engines, model: str, works: Sequence[Workload]) -> list[Case]:
    """A row of each work, with ours and the engines."""
    model_config(model)
    ways = [name for name, (engine, _) in engines.items() if engine in HUGGING_FACE]

    @cache  # all works are measured once the first row is asked for
    def answers(device: torch.device) -> dict[str, tuple[list[list[float]], str]]:
        taken_bytes(device)
        asked: Engines = {"ours": ("ours", {}), **engines}
        given = device, model, works
        return {name: engine_times(name, *how, *given) for name, how in asked.items()}

    def row(place: int, tokens: int, bench: Machine) -> dict[str, Any]:
        """RuntimeError, saying why, where ours was not measured."""
        found = answers(bench.device)
        seconds = {name: median(all_[place]) for name, (all_, _) in found.items() if all_[place:]}
        unavailable = {name: why for name, (all_, why) in found.items() if not all_[place:]}
        if "ours" not in seconds:
            raise RuntimeError(unavailable["ours"])
        return row_fields(seconds, ways, tokens=tokens) | {"unavailable": unavailable}

    cases = []
    for place, work in enumerate(works):
        # Tokens that count: new ones, of prefill alone those of the prompts.
        name, tokens = "generate", sum(work.lengths())
        if work.longest == 1:
            name, tokens = "prefill", work.sequences * work.prompt_len
        elif work.shortest < work.longest:
            name = "generate, joining"
        shape = {"model": model, **work.shape}
        cases.append(Case(work=name, shape=shape, run=partial(row, place, tokens)))
    return cases


def engine_times(
    name: str, engine: str, environment: Mapping[str, str], device: torch.device, model: str,
    works: Sequence[Workload],
) -> tuple[list[list[float]], str]:  # fmt: skip
    """Seconds of each run of each work that the process of one engine came to, and its failure."""
    config = model_config(model)
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    config.architectures = [classes[type(config)].__name__]
    config.dtype = torch.bfloat16
    longest = max(work.prompt_len + work.longest for work in works)
    # The cache that every engine gets: all sequences that run at a time, and a little room behind.
    blocks = int(1.02 * max(MAX_NUM_SEQS * (longest + 32), MAX_MODEL_LEN)) // KV_BLOCK
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    settings = {
        "engine": engine,
        "device": str(device),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "tokens_per_sequence": longest + TOKENS_BEYOND,
        "num_kv_blocks": blocks,
        "kv_cache_memory_bytes": blocks * KV_BLOCK * per_token,
        "works": [
            {
                "new_tokens": work.lengths(),
                "runs": [work.prompts(run, config.vocab_size) for run in ("warm", *"012")],
            }
            for work in works
        ],
    }
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(f"{place}/model")
        file, answer = Path(place, "settings.json"), Path(place, "answer.json")
        file.write_text(json.dumps(settings | {"model": f"{place}/model"}), "utf-8")
        command = ["-u", "-P", engine_process.__file__, str(file), str(answer)]
        printed, _, failure = run_child(name, command, environment)
        found = json.loads(answer.read_text("utf-8")) if answer.exists() else []
    if failure:
        print(printed[-5000:], file=sys.stderr, flush=True)
    return found, failure
