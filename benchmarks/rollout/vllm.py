"""vLLM on given prompts, in a process of its own, started by `benchmarks.rollout.others`.

`python -m benchmarks.rollout.vllm DIR [--batch-invariant]` reads a model and prompts.json from DIR
and prints one line of JSON at the end. vLLM reads the choice of mode from its environment when it
is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path


def main(directory: str, *options: str) -> None:
    """Generate twice; the second time counts."""
    if "--batch-invariant" in options:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    work = json.loads((Path(directory) / "prompts.json").read_text(encoding="utf-8"))
    vllm = import_module("vllm")
    engine = vllm.LLM(model=directory, skip_tokenizer_init=True, dtype="bfloat16")
    sampling = vllm.SamplingParams(
        max_tokens=work["new_tokens"], ignore_eos=True, temperature=1.0, detokenize=False
    )
    for shift in (0, 1):  # other prompts the second time: none is in the prefix cache
        prompts = [
            {"prompt_token_ids": [max(t - shift, 0) for t in prompt]} for prompt in work["prompts"]
        ]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"new_tokens_per_second": tokens / seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
