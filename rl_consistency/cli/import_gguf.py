"""`rl-consistency import-gguf`: the model of a GGUF file as a Hugging Face directory."""

from __future__ import annotations

import argparse

from rl_consistency.trainers.gguf_model import import_gguf


def run(args: argparse.Namespace) -> int:
    """Write the directory, and print what was made."""
    made = import_gguf(args.file, args.directory, dtype=args.dtype)
    stored = ", ".join(f"{kind} ({count} tensors)" for kind, count in made.stored.items())
    print(f"{made.name}: {made.architecture}, {made.parameters:,} parameters")
    print(f"weights: {stored} -> {made.dtype}")
    print(f"tokenizer: {made.tokens:,} tokens, split as llama.cpp's {made.pre_tokenizer}")
    print(f"written: {made.directory}")
    return 0
