"""One engine of the suite `vllm` in a process of its own: ours, or vLLM, perhaps with the plug-in.

`python -P plugin_process.py SETTINGS ANSWER` gets an engine ready, generates the works of the first
JSON file and loads the model's weights again. It writes the second file after each of these.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.rollout.engine_process import Engine, generation, measured

KV_BLOCK, CACHE_SHARE = 16, 0.85
LOADS = 3
"""Times that the weights are loaded again; the fastest counts."""

Load = Callable[[], float] | None
"""Loads the checkpoint again and gives the seconds, where an engine takes weights."""


def ours(settings: Mapping[str, Any]) -> tuple[Engine, Load]:
    """Our engine with its defaults, but for `max_num_seqs` and a cache that, like vLLM's, takes
    the memory that is free as far as the works need it."""
    torch, transformers = import_module("torch"), import_module("transformers")
    rlc = import_module("rl_consistency")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    rlc.patch(model.to(settings["device"]).eval())
    blocks = settings["kv_blocks"]
    if model.device.type == "cuda":
        layers, heads, columns = import_module("rl_consistency.models.forward").cache_sizes(model)
        block_bytes = 4 * KV_BLOCK * layers * heads * columns
        blocks = min(blocks, int(CACHE_SHARE * torch.cuda.mem_get_info()[0]) // block_bytes)
    engine = rlc.RolloutEngine(
        model, eos_token_id=None, max_num_seqs=settings["max_num_seqs"], num_kv_blocks=blocks
    )
    engine.warm_up(rlc.SamplingParams(max_tokens=settings["longest"], ignore_eos=True))

    def prepared(prompts: Any, counts: Any) -> Callable[[], list[int]]:
        wanted = [rlc.SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
        return lambda: [len(each.token_ids) for each in engine.generate(prompts, wanted)]

    return prepared, None


def vllm(settings: Mapping[str, Any]) -> tuple[Engine, Load]:
    """vLLM with its defaults and the options given, its engine in a process of its own."""
    module = import_module("vllm")
    engine = module.LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        seed=0,
        **settings["vllm"],
    )
    folder = settings["model"]

    def load() -> float:
        # A function, no partial one: only those does vLLM pickle by value.
        (seconds,) = engine.apply_model(lambda model: load_again(model, folder))
        engine.reset_prefix_cache()
        return seconds

    return generation(module, engine), load


def load_again(model: Any, folder: str) -> float:
    """Seconds for all tensors of a checkpoint, each of which is already on the device when the
    model gets it; with the plug-in the digests of the weights before and after count too."""
    # vLLM pickles this function into another process, so that it imports for itself.
    torch, safetensors = import_module("torch"), import_module("safetensors")
    clock, place = import_module("time").perf_counter, import_module("pathlib").Path(folder)
    waited = 0.0

    def tensors() -> Iterator[tuple[str, Any]]:
        nonlocal waited
        for file in sorted(place.glob("*.safetensors")):
            with safetensors.safe_open(file, "pt", device="cuda") as shard:
                for name in shard.keys():  # noqa: SIM118, it is no mapping
                    torch.cuda.synchronize()
                    began = clock()
                    tensor = shard.get_tensor(name)
                    torch.cuda.synchronize()
                    waited += clock() - began
                    yield name, tensor

    digest = getattr(model, "digest", lambda: None)
    torch.cuda.synchronize()
    began = clock()
    digest()
    model.load_weights(tensors())
    digest()
    torch.cuda.synchronize()
    return clock() - began - waited


def main(settings_file: str, answer_file: str) -> None:
    """Get ready, then measure all works and the loading of weights."""
    settings = json.loads(Path(settings_file).read_text("utf-8"))
    answer: dict[str, Any] = {"works": []}

    def write() -> None:
        Path(answer_file).write_text(json.dumps(answer), "utf-8")

    engine, load = {"ours": ours, "vllm": vllm}[settings["engine"]](settings)
    engine([[3, 4, 5]], [1])()
    answer["ready"] = time.time() - settings["began"]
    write()
    if settings["fill"]:
        return
    for work in settings["works"]:
        answer["works"].append(measured(engine, work))
        write()
    if load is not None:
        answer["load"] = min(load() for _ in range(LOADS))
        write()


if __name__ == "__main__":
    main(*sys.argv[1:])
