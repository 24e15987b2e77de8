"""One engine in a process of its own: ours or vLLM, for the bench that holds them side by side.

`python -P engine_process.py ours|vllm SETTINGS ANSWER` builds the engine that the first JSON file
describes, generates its works, and writes the second one after each of them. It imports nothing of
the project at the top: vLLM's process has it not.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Prompts = Sequence[Sequence[int]]
Pairs = list[tuple[list[int], list[float]]]
"""Token ids and their logprobs, of each completion."""

MAX_MODEL_LEN = 2048
"""Longest sequence that vLLM gets ready for."""
REPEATS, REPEAT_SECONDS = 3, 20.0
"""Runs of a work; no further one begins after so many seconds of them."""
WARM_TOKENS = 8

CHECK = {"alone": 16, "others": 240, "new_tokens": 64, "longest_prompt": 512}
"""Prompts decoded greedily alone and among others, new tokens of each, and their longest prompt."""


def redraw(model: Any) -> None:
    """Draw weights of the same kind on both sides: matrices N(0, 0.02), norms 1, biases 0."""
    # vLLM pickles this function into another process, so that it imports for itself.
    torch = import_module("torch")
    generator = None
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = generator or torch.Generator(parameter.device).manual_seed(0)
            parameter.normal_(0.0, 0.02, generator=generator)


class Ours:
    """Our engine with its defaults, but for `max_num_seqs` and the size of its cache."""

    def __init__(self, settings: Mapping[str, Any]):
        torch, transformers = import_module("torch"), import_module("transformers")
        patch = import_module("rl_consistency.models.patch").patch
        engine = import_module("rl_consistency.rollout.engine").RolloutEngine
        self._sampling = import_module("rl_consistency.rollout.sampling_params").SamplingParams
        config = transformers.AutoConfig.from_pretrained(settings["model"])
        with torch.device(settings["device"]):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        redraw(model.eval())
        self._session = patch(model)
        self._engine = engine(
            model,
            eos_token_id=None,
            max_num_seqs=settings["max_num_seqs"],
            num_kv_blocks=settings["num_kv_blocks"],
        )
        longest = settings["tokens_per_sequence"]
        self._engine.warm_up(self._sampling(max_tokens=longest, ignore_eos=True))
        self.about: dict[str, Any] = {}

    def generate(
        self, prompts: Prompts, counts: Sequence[int], temperature: float
    ) -> tuple[float, Pairs]:
        """Seconds, and tokens with their logprobs; no key is cached before, as in vLLM."""
        # Drop all cached keys, as a stream does that is closed before its end.
        short = [self._sampling(max_tokens=n, ignore_eos=True) for n in (1, 8)]
        stream = self._engine.stream([prompts[0][:8]] * 2, short)
        next(stream)
        stream.close()
        options = {"temperature": temperature, "ignore_eos": True}
        sampling = [self._sampling(max_tokens=n, **options) for n in counts]
        began = time.perf_counter()
        found = self._engine.generate(prompts, sampling)
        seconds = time.perf_counter() - began
        self.about["preemptions"] = self._engine.stats.preemptions
        return seconds, [(list(c.token_ids), c.token_logprobs.tolist()) for c in found]


class Vllm:
    """vLLM with its defaults: what is set fits the engine to the work and the network away."""

    def __init__(self, settings: Mapping[str, Any]):
        self._vllm = import_module("vllm")
        self._engine = self._vllm.LLM(
            model=settings["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=settings["max_num_seqs"],
            # Prompts are random, and ours has its cache emptied before each call.
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, 257, 16)]},
            seed=0,
            kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
            gpu_memory_utilization=0.1,
        )
        self.about: dict[str, Any] = {"version": self._vllm.__version__}
        self._engine.apply_model(redraw)

    def generate(
        self, prompts: Prompts, counts: Sequence[int], temperature: float
    ) -> tuple[float, Pairs]:
        """Seconds, and tokens with their logprobs."""
        options = {"temperature": temperature, "ignore_eos": True}
        options |= {"logprobs": 0, "detokenize": False}
        sampling = [self._vllm.SamplingParams(max_tokens=n, **options) for n in counts]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        found = self._engine.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        samples = [output.outputs[0] for output in found]
        return seconds, [
            (
                list(s.token_ids),
                [d[t].logprob for t, d in zip(s.token_ids, s.logprobs, strict=True)],
            )
            for s in samples
        ]


ENGINES: dict[str, Any] = {"ours": Ours, "vllm": Vllm}


def drawn_prompts(run: str, vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of these lengths, other ones for every `run`."""
    draw = random.Random(run)
    return [draw.choices(range(vocabulary), k=length) for length in lengths]


def measured(engine: Any, place: str, work: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """The `seconds` of each call of a work, once its size is warm, and what the engine counts.
    RuntimeError unless every completion is whole."""
    counts, lengths = work["new_tokens"], [work["prompt_len"]] * len(work["new_tokens"])
    warm = [min(WARM_TOKENS, count) for count in counts]
    engine.generate(drawn_prompts(f"warm {place}", vocabulary, lengths), warm, 1.0)
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < REPEAT_SECONDS:
        prompts = drawn_prompts(f"{place} {len(times)}", vocabulary, lengths)
        seconds, pairs = engine.generate(prompts, counts, 1.0)
        if (found := [len(tokens) for tokens, _ in pairs]) != counts:
            raise RuntimeError(f"{len(found)} completions of {sorted(set(found))} tokens came back")
        times.append(seconds)
    return {"seconds": times, **engine.about}


def dependent_share(engine: Any, check: Mapping[str, int], vocabulary: int) -> float:
    """The share of logprobs that change with the sequences beside them: prompts are decoded
    greedily, alone and then among others. `check` is like `CHECK`."""
    draw, longest, count = random.Random("batch"), check["longest_prompt"], check["alone"]
    alone = [draw.randint(longest // 8, longest // 2) for _ in range(count)]
    others = [draw.randint(longest // 32, longest) for _ in range(check["others"])]
    prompts = drawn_prompts("alone", vocabulary, alone)
    beside, start = drawn_prompts("others", vocabulary, others), len(others) * 2 // 5
    batch = [*beside[:start], *prompts, *beside[start:]]
    _, one = engine.generate(prompts, [check["new_tokens"]] * count, 0.0)
    _, other = engine.generate(batch, [check["new_tokens"]] * len(batch), 0.0)
    return differing_share(one, other[start : start + count])


def differing_share(one: Pairs, other: Pairs) -> float:
    """Share of logprobs with other bits, of those up to and with each sequence's first token that
    differs: what follows it has another past."""
    compared = differing = 0
    for (tokens, logprobs), (tokens_2, logprobs_2) in zip(one, other, strict=True):
        for a, b, x, y in zip(tokens, tokens_2, logprobs, logprobs_2, strict=True):
            compared += 1
            differing += a != b or struct.pack("<f", x) != struct.pack("<f", y)
            if a != b:
                break
    return differing / compared


def main() -> None:
    """Measure all works."""
    name, settings_file, answer_file = sys.argv[1:]
    settings = json.loads(Path(settings_file).read_text("utf-8"))
    answer: dict[str, Any] = {"works": []}
    engine, vocabulary = ENGINES[name](settings), settings["vocabulary"]
    for place, work in enumerate(settings["works"]):
        answer["works"].append(measured(engine, str(place), work, vocabulary))
        Path(answer_file).write_text(json.dumps(answer), "utf-8")
    answer["batch_dependent"] = dependent_share(engine, settings["check"], vocabulary)
    Path(answer_file).write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    main()
