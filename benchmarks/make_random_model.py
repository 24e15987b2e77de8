"""A model directory of a real model's shape with random weights: nothing to download.

`python -m benchmarks.make_random_model --preset qwen3-0.6b DIR` writes config.json,
model.safetensors and a tokenizer of one token per byte, as `policy.path` of a recipe wants them.
Presets are the models of `benchmarks.models`, such as qwen3-0.6b or olmoe-1b-7b-12l.
The weights have outlier channels (see `rl_consistency.verify.presets`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import model_config
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.verify.presets import build_lifelike


def main(arguments: list[str] | None = None) -> int:
    """Write the directory; 2 where it already holds a model, and on a name of no model."""
    parser = argparse.ArgumentParser(
        description="write a model directory with random weights", allow_abbrev=False
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", metavar="NAME", default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if (args.directory / "config.json").exists():
        print(f"{args.directory} already holds a model; remove it or choose another directory")
        return 2
    try:
        config = model_config(args.preset)
    except ValueError as error:
        parser.error(f"--preset: {error}")
    tokenizer, dtype = byte_tokenizer(), getattr(torch, args.dtype)
    model: Any = build_lifelike(config, dtype, seed=args.seed, device=args.device)
    for settings in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(settings, name, getattr(tokenizer, name))
    model.save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    print(f"{args.preset} with random weights ({args.dtype}) in {args.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
