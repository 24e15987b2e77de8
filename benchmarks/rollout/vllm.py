"""Our engine and vLLM on the same model and work: one after the other, a process each.

All get the same configuration of the model, weights N(0, 0.02), prompts and lengths, return
logprobs, and have a cache of one size. Ours has the defaults of `RolloutEngine` but for that and
`max_num_seqs`; what vLLM is given is in engine_process.py and below. Times are medians of whole
calls on the host's clock, prefill included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.models import model_config
from benchmarks.rollout import engine_process
from benchmarks.rollout.child import run_child
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.suite import Case, Suites
from benchmarks.timing import Machine

MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b")
MODES = {"defaults": "vllm", "invariant": "vllm batch-invariant"}
"""What `--against` names -> the name in a row."""

WORKS = (
    Workload.equal(256, 1, 512, 128),
    Workload.equal(256, 1, 512, 1),
    # More sequences than run at a time, of many lengths: prompts join those that decode.
    Workload(640, 1, 128, longest=256, shortest=20),
    Workload.equal(1, 1, 512, 256),
    Workload.equal(256, 1, 512, 1024),
)
MAX_NUM_SEQS, KV_BLOCK = 256, 16

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

Answer = Mapping[str, Any]
"""`works`, what was measured of each, as far as it came; perhaps `batch_dependent` and `failure`,
why the rest is missing."""


def vllm_suites(site: Path, models: Sequence[str], modes: Sequence[str]) -> Suites:
    """A suite of each model. ValueError on a folder without vLLM, on unknown models and modes."""
    if not (site / "vllm" / "__init__.py").is_file():
        raise ValueError(
            f"--vllm {site}: no folder `vllm` with a package is in it; give the site-packages "
            "folder into which vLLM was unpacked or installed."
        )
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"--against {','.join(unknown)}: give some of {', '.join(MODES)}.")
    suites: dict[str, list[Case]] = {}
    for model in models:
        model_config(model)
        answers: dict[str, Answer] = {}  # of all works, once the first row is asked for
        run = partial(_row, model, answers, partial(_environments, site, modes))
        suites[f"rollout_vllm_{model}"] = [
            Case(work=name, shape={"model": model, **work.shape}, run=partial(run, place))
            for place, (work, name) in enumerate(zip(WORKS, map(_name, WORKS)))
        ]
    return suites


def _name(work: Workload) -> str:
    if work.longest == 1:
        return "prefill"
    return "generate" if work.shortest == work.longest else "generate, joining"


def _environments(site: Path, modes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Name of a row's engine -> the environment of its process."""
    libraries = filter(None, [os.environ.get("LD_LIBRARY_PATH"), "/usr/local/nvidia/lib64"])
    theirs = ENVIRONMENT | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": str(site.resolve()),
        "VLLM_CACHE_ROOT": str(site.resolve() / ".cache"),
    }
    found: dict[str, dict[str, str]] = {"ours": {}}
    for mode in modes:
        found[MODES[mode]] = theirs | {"VLLM_BATCH_INVARIANT": str(int(mode == "invariant"))}
    return found


def _row(
    model: str, answers: dict[str, Answer], environments: Callable[[], dict[str, dict[str, str]]],
    place: int, bench: Machine,
) -> dict[str, Any]:  # fmt: skip
    """The fields of one work's row; RuntimeError, saying why, where ours was not measured."""
    if not answers:
        for name, environment in environments().items():
            answers[name] = engine_answer(name, model, environment, bench.device)
    work = WORKS[place]
    # Tokens that count: new ones, of prefill alone those of the prompts.
    tokens = work.sequences * work.prompt_len if work.longest == 1 else sum(work.lengths())
    seconds: dict[str, float] = {}
    figures: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    for name, answer in answers.items():
        if place >= len(answer["works"]):
            unavailable[name] = answer["failure"]
            continue
        found = dict(answer["works"][place])
        seconds[name] = median(found.pop("seconds"))
        figures |= {f"{name}/{key}": value for key, value in found.items()}
        if place == 0 and "batch_dependent" in answer:
            figures[f"{name}/batch_dependent"] = answer["batch_dependent"]
    if "ours" not in seconds:
        raise RuntimeError(unavailable["ours"])
    figures |= {f"{n}/ratio": s / seconds["ours"] for n, s in seconds.items() if n != "ours"}
    return {
        "ours_us": 1e6 * seconds["ours"],
        "peers": {name: 1e6 * s for name, s in seconds.items() if name != "ours"},
        "tokens_per_second": {name: tokens / s for name, s in seconds.items()},
        "figures": figures,
        "unavailable": unavailable,
    }


def engine_answer(
    name: str, model: str, environment: Mapping[str, str], device: torch.device,
    works: Sequence[Workload] = WORKS, check: Mapping[str, int] = engine_process.CHECK,
) -> Answer:  # fmt: skip
    """What the process of one engine found; what it did before it failed stays."""
    with tempfile.TemporaryDirectory() as place:
        config = model_config(model)
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        config.architectures = [classes[type(config)].__name__]
        config.dtype = torch.bfloat16
        config.save_pretrained(f"{place}/model")
        longest = max(work.prompt_len + work.longest for work in works)
        longest = max(longest, check["longest_prompt"] + check["new_tokens"])
        settings = {
            "model": f"{place}/model",
            "device": str(device),
            "vocabulary": config.vocab_size,
            "max_num_seqs": MAX_NUM_SEQS,
            "tokens_per_sequence": longest + TOKENS_BEYOND,
            **kv_cache_size(config, MAX_NUM_SEQS, longest),
            "check": check,
            "works": [{"prompt_len": w.prompt_len, "new_tokens": w.lengths()} for w in works],
        }
        given, answer = Path(place, "settings.json"), Path(place, "answer.json")
        given.write_text(json.dumps(settings), "utf-8")
        engine = "ours" if name == "ours" else "vllm"
        command = ["-u", "-P", engine_process.__file__, engine, str(given), str(answer)]
        child = run_child(name, command, environment, answer)
    if child.failure is None:
        return child.answer
    print(child.printed[-5000:], file=sys.stderr, flush=True)
    return {"works": [], **child.answer, "failure": child.failure}


def kv_cache_size(config: Any, sequences: int, length: int) -> dict[str, int]:
    """The cache that every engine gets, in blocks of ours and in bytes of bf16: so many sequences,
    with a little room behind each."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    tokens = max(sequences * (length + 32), engine_process.MAX_MODEL_LEN)
    blocks = int(1.02 * tokens) // KV_BLOCK
    return {"num_kv_blocks": blocks, "kv_cache_memory_bytes": blocks * KV_BLOCK * per_token}
