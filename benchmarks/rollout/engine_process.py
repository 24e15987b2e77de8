"""One engine in a process of its own: ours, Hugging Face's `generate`, or vLLM.

`python -P engine_process.py SETTINGS ANSWER` builds the engine that the first JSON file describes,
generates its works, and writes the second one after each of them. It imports nothing of the project
at the top: vLLM's process has it not. An engine takes prompts and how many tokens to draw for each,
and gives the call that is timed, which says how many came back.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

Engine = Callable[[Sequence[Sequence[int]], Sequence[int]], Callable[[], list[int]]]

REPEAT_SECONDS = 20.0
"""No further run of a work begins after so many seconds of them."""
WARM_TOKENS = 8


def redraw(model: Any) -> None:
    """Draw weights of the same kind on all sides: matrices N(0, 0.02), norms 1, biases 0."""
    # vLLM pickles this function into another process, so that it imports for itself.
    torch = import_module("torch")
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)


def _model(settings: Mapping[str, Any]) -> Any:
    """A model of transformers in bf16 on the device."""
    torch, transformers = import_module("torch"), import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(settings["model"])
    with torch.device(settings["device"]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    redraw(model.eval())
    return model


def ours(settings: Mapping[str, Any]) -> Engine:
    """Our engine with its defaults, but for `max_num_seqs` and the size of its cache."""
    sampling = import_module("rl_consistency.rollout.sampling_params").SamplingParams
    model = _model(settings)
    import_module("rl_consistency.models.patch").patch(model)
    engine = import_module("rl_consistency.rollout.engine").RolloutEngine(
        model,
        eos_token_id=None,
        max_num_seqs=settings["max_num_seqs"],
        num_kv_blocks=settings["num_kv_blocks"],
    )
    engine.warm_up(sampling(max_tokens=settings["tokens_per_sequence"], ignore_eos=True))

    def prepared(prompts: Any, counts: Any) -> Callable[[], list[int]]:
        wanted = [sampling(max_tokens=count, ignore_eos=True) for count in counts]
        return lambda: [len(each.token_ids) for each in engine.generate(prompts, wanted)]

    return prepared


def hugging_face(settings: Mapping[str, Any]) -> Engine:
    """`generate` with a dynamic or a static cache, without compiling. All completions are as long,
    which spares it padding."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model, static = _model(settings), settings["engine"] == "static"

    def prepared(prompts: Any, counts: Any) -> Callable[[], list[int]]:
        model.generation_config = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=counts[0],
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static" if static else None,
            disable_compile=True,
        )
        ids = torch.tensor(prompts, device=model.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return lambda: [len(row) - ids.shape[1] for row in model.generate(**given).tolist()]

    return prepared


def vllm(settings: Mapping[str, Any]) -> Engine:
    """vLLM with its defaults: what is set fits the engine to the work and the network away."""
    module = import_module("vllm")
    engine = module.LLM(
        model=settings["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,  # all prompts are random
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, 257, 16)]},
        seed=0,
        kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
        gpu_memory_utilization=0.1,
    )
    engine.apply_model(redraw)
    return generation(module, engine)


def generation(module: Any, engine: Any) -> Engine:
    """Completions of an engine of the module vLLM, with the logprobs of their tokens."""
    options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}

    def prepared(prompts: Any, counts: Any) -> Callable[[], list[int]]:
        sampling = [module.SamplingParams(max_tokens=count, **options) for count in counts]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        run = partial(engine.generate, inputs, sampling, use_tqdm=False)
        return lambda: [len(each.outputs[0].token_ids) for each in run()]

    return prepared


def measured(engine: Engine, work: Mapping[str, Any]) -> list[float]:
    """The seconds of each run of a work, once its size is warm. RuntimeError unless every
    completion is whole."""
    counts, (first, *runs) = work["new_tokens"], work["runs"]
    engine(first, [min(WARM_TOKENS, count) for count in counts])()
    times: list[float] = []
    for prompts in runs:
        if sum(times) < REPEAT_SECONDS:
            generate, began = engine(prompts, counts), time.perf_counter()
            found = generate()
            times.append(time.perf_counter() - began)
            if found != counts:
                raise RuntimeError(f"{len(found)} completions, {sum(found)} tokens came back")
    return times


def main(settings_file: str, answer_file: str) -> None:
    """Measure all works."""
    settings, answer = json.loads(Path(settings_file).read_text("utf-8")), []
    engine = {"ours": ours, "vllm": vllm}.get(settings["engine"], hugging_face)(settings)
    for work in settings["works"]:
        answer.append(measured(engine, work))
        Path(answer_file).write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
