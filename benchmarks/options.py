"""Options of `rl-consistency bench rollout` that describe a workload of the caller's."""

from __future__ import annotations

import argparse
from pathlib import Path

BATCH, PROMPT_LEN, NEW_TOKENS = 256, 512, 1024
PRESETS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "llama3-8b")

_NAMES = ("preset", "model", "batch", "prompt_len", "new_tokens", "mode")


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them; any of them measures that workload instead of the suites behind the bars."""
    group = parser.add_argument_group("a workload of your own, for `bench rollout`")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=PRESETS, help="a model's shape, random weights")
    source.add_argument("--model", type=Path, metavar="DIR", help="a model directory")
    group.add_argument("--batch", type=int, metavar="N", help=f"sequences (default {BATCH})")
    group.add_argument(
        "--prompt-len", type=int, metavar="N", help=f"tokens of a prompt (default {PROMPT_LEN})"
    )
    group.add_argument(
        "--new-tokens", type=int, metavar="N", help=f"most new tokens (default {NEW_TOKENS})"
    )
    group.add_argument(
        "--mode", choices=("strict", "stock"), help="only canonical or only stock ops"
    )


def rollout_options(args: argparse.Namespace) -> list[str]:
    """Those of them that were given, as they are written."""
    given = [name for name in _NAMES if getattr(args, name) is not None]
    return [f"--{name.replace('_', '-')}" for name in given]
