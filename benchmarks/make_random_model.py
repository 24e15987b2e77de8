"""A model directory of a real model's shape with random weights: nothing to download.

`python -m benchmarks.make_random_model --preset qwen3-0.6b DIR` writes config.json,
model.safetensors and a tokenizer of one token per byte, as `policy.path` of a recipe wants them.
The weights have outlier channels (see `rl_consistency.verify.presets`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.verify.presets import build_preset, known_presets

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: list[str] | None = None) -> int:
    """Write the directory; 2 where it already holds a model."""
    parser = argparse.ArgumentParser(description="write a model directory with random weights")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", choices=known_presets(), default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if (args.directory / "config.json").exists():
        print(f"{args.directory} already holds a model; remove it or choose another directory")
        return 2
    write(args.directory, args.preset, DTYPES[args.dtype], seed=args.seed, device=args.device)
    print(f"{args.preset} with random weights ({args.dtype}) in {args.directory}")
    return 0


def write(directory: Path, preset: str, dtype: torch.dtype, *, seed: int, device: str) -> None:
    """Build the preset, give it the byte tokenizer's special tokens, and save both."""
    tokenizer = byte_tokenizer()
    model: Any = build_preset(preset, dtype, seed=seed, device=device)
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = tokenizer.bos_token_id
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    raise SystemExit(main())
