"""One engine in a process of its own: ours or vLLM, for the bench that holds them side by side.

`python -P engine_child.py ours|vllm FOLDER` builds the engine that FOLDER/settings.json describes
and writes FOLDER/ready.answer.json. Each line of standard input then names a request, NAME, to be
read from FOLDER/NAME.json and answered in FOLDER/NAME.answer.json. The process ends with its input
or with the first error. It imports nothing of the project at the top: vLLM's process has it not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Prompts = Sequence[Sequence[int]]
Answered = tuple[float, Any]
"""Seconds, and what the engine gave."""
Pairs = list[tuple[list[int], list[float]]]
"""Token ids and their logprobs, of each completion."""

MAX_MODEL_LEN = 2048
"""Longest sequence that vLLM gets ready for."""

NOT_REDRAWN = (
    AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What vLLM may raise where its weights cannot be written from outside."""


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
        sampling = import_module("rl_consistency.rollout.sampling_params").SamplingParams
        config = transformers.AutoConfig.from_pretrained(settings["model"])
        with torch.device(settings["device"]):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        redraw(model.eval())
        self._session, self._sampling = patch(model), sampling
        self._engine = engine(
            model,
            eos_token_id=None,
            max_num_seqs=settings["max_num_seqs"],
            num_kv_blocks=settings["num_kv_blocks"],
        )
        longest = settings["tokens_per_sequence"]
        self._engine.warm_up(sampling(max_tokens=longest, ignore_eos=True))
        self.about = {"weights": "normal"}

    def generate(self, prompts: Prompts, counts: list[int], temperature: float) -> Answered:
        """Seconds and completions; no key is cached before, as in vLLM's process."""
        self._forget(prompts[0])
        options = {"temperature": temperature, "ignore_eos": True}
        sampling = [self._sampling(max_tokens=n, **options) for n in counts]
        began = time.perf_counter()
        found = self._engine.generate(prompts, sampling)
        return time.perf_counter() - began, found

    def statistics(self) -> dict[str, int]:
        """Sequences that lost their keys for want of cache blocks, in the latest call."""
        return {"preemptions": self._engine.stats.preemptions}

    def _forget(self, prompt: Sequence[int]) -> None:
        """Drop all cached keys, as a stream does that is closed before its end."""
        lengths = (self._sampling(max_tokens=n, ignore_eos=True) for n in (1, 8))
        stream = self._engine.stream([prompt[:8]] * 2, list(lengths))
        next(stream)
        stream.close()

    @staticmethod
    def lengths(found: Any) -> list[int]:
        """The lengths of completions."""
        return [len(completion.token_ids) for completion in found]

    @staticmethod
    def pairs(found: Any) -> Pairs:
        """Tokens and logprobs as Python numbers; those of fp32 are exact."""
        return [(list(c.token_ids), c.token_logprobs.tolist()) for c in found]


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
            # Prompts are random, and ours has its cache emptied before each request.
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, 257, 16)]},
            seed=0,
            kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
            gpu_memory_utilization=0.1,
        )
        self.about = {"version": self._vllm.__version__, "weights": "normal"}
        try:
            self._engine.apply_model(redraw)
        except NOT_REDRAWN as error:
            # vLLM's own dummies are below 1e-3; they give the same speed, and duller logprobs.
            self.about["weights"] = "vLLM's dummies"
            print(f"weights not redrawn: {type(error).__name__} {error}", flush=True)

    def generate(self, prompts: Prompts, counts: list[int], temperature: float) -> Answered:
        """Seconds and outputs, each sampled token's logprob among them."""
        options = {"temperature": temperature, "ignore_eos": True}
        options |= {"logprobs": 0, "detokenize": False}
        sampling = [self._vllm.SamplingParams(max_tokens=n, **options) for n in counts]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        found = self._engine.generate(inputs, sampling, use_tqdm=False)
        return time.perf_counter() - began, found

    def statistics(self) -> dict[str, int]:
        """No statistics: vLLM's log holds its own."""
        return {}

    @staticmethod
    def lengths(found: Any) -> list[int]:
        """The lengths of completions."""
        return [len(output.outputs[0].token_ids) for output in found]

    @staticmethod
    def pairs(found: Any) -> Pairs:
        """Tokens and logprobs as Python numbers."""
        samples = [output.outputs[0] for output in found]
        return [
            (
                list(s.token_ids),
                [d[t].logprob for t, d in zip(s.token_ids, s.logprobs, strict=True)],
            )
            for s in samples
        ]


ENGINES = {"ours": Ours, "vllm": Vllm}


def served(engine: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request; RuntimeError unless every completion is whole."""
    prompts, counts = request["prompts"], request["new_tokens"]
    if isinstance(counts, int):
        counts = [counts] * len(prompts)
    seconds, found = engine.generate(prompts, counts, request["temperature"])
    if (lengths := engine.lengths(found)) != counts:
        raise RuntimeError(f"{len(found)} completions of {sorted(set(lengths))} tokens came back")
    answer: dict[str, Any] = {"seconds": seconds, **engine.statistics()}
    return answer | {"completions": engine.pairs(found)} if request["keep"] else answer


def write(folder: Path, name: str, answer: Mapping[str, Any]) -> None:
    """An answer in one piece: its reader never sees the half of it."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(part, folder / f"{name}.answer.json")


def main() -> None:
    """Serve until the input ends."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    began = time.perf_counter()
    engine = ENGINES[name](json.loads((folder / "settings.json").read_text("utf-8")))
    write(folder, "ready", {"seconds": time.perf_counter() - began, **engine.about})
    for line in sys.stdin:
        request = json.loads((folder / f"{line.strip()}.json").read_text("utf-8"))
        write(folder, line.strip(), served(engine, request))


if __name__ == "__main__":
    main()
