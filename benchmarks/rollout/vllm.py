"""vLLM on given prompts, in a process of its own: `bench_rollout_peers` starts it.

`python -m benchmarks.rollout.vllm DIR [--batch-invariant]` reads a model and
prompts.json from DIR; the last line it prints is JSON. Batch-invariant mode is chosen by a variable
that vLLM reads when it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Generate twice and report the second run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--batch-invariant", action="store_true")
    args = parser.parse_args()
    if args.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    work = json.loads((args.directory / "prompts.json").read_text(encoding="utf-8"))
    vllm = import_module("vllm")
    engine = vllm.LLM(model=str(args.directory), skip_tokenizer_init=True, dtype="bfloat16")
    sampling = vllm.SamplingParams(
        max_tokens=work["new_tokens"], ignore_eos=True, temperature=1.0, detokenize=False
    )
    vocabulary_shift = (0, 1)  # other prompts the second time: none is in the prefix cache
    for shift in vocabulary_shift:
        prompts = [
            {"prompt_token_ids": [max(t - shift, 0) for t in prompt]} for prompt in work["prompts"]
        ]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"new_tokens_per_second": tokens / seconds}))


if __name__ == "__main__":
    main()
