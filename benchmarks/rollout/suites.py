"""The suites of `rl-consistency bench rollout`, and the workload a caller describes."""

from __future__ import annotations

import argparse

from benchmarks.options import BATCH, NEW_TOKENS, PROMPT_LEN, rollout_options
from benchmarks.rollout.cases import (
    MODES,
    decode_case,
    idle_case,
    long_context_case,
    roofline_case,
)
from benchmarks.rollout.copying import copying_case
from benchmarks.rollout.grpo import grpo_step_case
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.peers import (
    GENERATE,
    GENERATE_BATCH,
    hugging_face_case,
    public_engines_case,
)
from benchmarks.rollout.table import OWN
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Suite

GROUP_SIZE = 8
SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
DECODED = (SMALL, "qwen3-1.7b", LARGE)
"""Presets whose decode throughput is measured."""


def own_workload(args: argparse.Namespace) -> Suite | None:
    """The suite of the workload that the options describe; None where there is no such option.

    Raises:
        ValueError: a number out of range, or no model in the directory.
    """
    if not rollout_options(args):
        return None
    for name in ("batch", "prompt_len", "new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
    if args.model is not None and not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model}: no directory with a config.json.")
    batch, new_tokens = args.batch or BATCH, args.new_tokens or NEW_TOKENS
    group_size = GROUP_SIZE if batch % GROUP_SIZE == 0 else 1
    workload = Workload(
        groups=batch // group_size,
        group_size=group_size,
        prompt_len=args.prompt_len or PROMPT_LEN,
        longest=new_tokens,
        shortest=min(32, new_tokens),
    )
    name = str(args.model) if args.model is not None else args.preset or SMALL
    modes = MODES if args.mode is None else (args.mode,)
    case = decode_case(ModelShelf(), name, workload, modes=modes)
    return Suite(OWN, "a workload of the caller's", [case])


def rollout_suites(*, quick: bool = False) -> list[Suite]:
    """The suites behind the bars; `quick` keeps small workloads of each."""
    shelf = ModelShelf()
    first, *larger = _decode_suites(shelf, quick)
    return [
        first,
        Suite(
            "rollout_roofline",
            "bytes of a decode step over the copy bandwidth",
            [
                roofline_case(shelf, LARGE, batch, prompt_len=960, new_tokens=32 if quick else 96)
                for batch in ((64,) if quick else (64, 128, 256))
            ],
        ),
        Suite(
            "rollout_idle",
            "share of decoding in which the GPU waits",
            [
                idle_case(shelf, SMALL, batch, prompt_len=PROMPT_LEN, new_tokens=128)
                for batch in ((32,) if quick else (32, 64, 256))
            ],
        ),
        _hugging_face_suite(shelf, quick),
        Suite(
            "rollout_public",
            "public engines on the same prompts and lengths",
            [public_engines_case(shelf, SMALL, _equal_lengths(BATCH, 128))],
        ),
        Suite(
            "rollout_speculation",
            "prompt-lookup drafts on a copied text against plain decoding",
            [
                copying_case(shelf, SMALL, batch, new_tokens=128 if quick else 512)
                for batch in ((1,) if quick else (1, 8))
            ],
        ),
        Suite(
            "rollout_long_context",
            "one sequence behind 32k tokens against 1k",
            [long_context_case(shelf, SMALL, 8192 if quick else 32768, 1024, new_tokens=64)],
        ),
        Suite(
            "rollout_grpo_step",
            "rollout, training passes and update, strict against stock",
            [
                grpo_step_case(
                    shelf,
                    SMALL,
                    Workload(
                        groups=2 if quick else 8,
                        group_size=GROUP_SIZE,
                        prompt_len=256,
                        longest=64 if quick else 256,
                        shortest=64 if quick else 256,
                    ),
                    micro_batch=16,
                    rounds=1 if quick else 2,
                )
            ],
        ),
        *larger,  # stock ops take the longest here, and time may be short
    ]


def _decode_suites(shelf: ModelShelf, quick: bool) -> list[Suite]:
    """One for each shape, so that each can be measured by itself."""
    workload = Workload(
        groups=8 if quick else BATCH // GROUP_SIZE,
        group_size=GROUP_SIZE,
        prompt_len=PROMPT_LEN,
        longest=256 if quick else NEW_TOKENS,
    )
    return [
        Suite(
            f"rollout_decode_{name}",
            "decode throughput against the same engine with stock ops",
            [decode_case(shelf, name, workload)],
        )
        for name in DECODED
        if not quick or name == SMALL
    ]


def _hugging_face_suite(shelf: ModelShelf, quick: bool) -> Suite:
    count = 64 if quick else BATCH
    generate = _equal_lengths(count, 16 if quick else 128)
    batched = _equal_lengths(count, 8 if quick else 32)
    return Suite(
        "rollout_hugging_face",
        "new tokens per second against Hugging Face's generate and generate_batch",
        [
            hugging_face_case(shelf, name, workload, work, ways)
            for name, workload, work, ways in (
                (SMALL, generate, "generate", GENERATE),
                (SMALL, batched, "generate_batch", GENERATE_BATCH),
                *([] if quick else [(DECODED[1], generate, "generate", GENERATE)]),
            )
        ],
    )


def _equal_lengths(sequences: int, new_tokens: int) -> Workload:
    return Workload(
        groups=sequences // GROUP_SIZE,
        group_size=GROUP_SIZE,
        prompt_len=PROMPT_LEN,
        longest=new_tokens,
        shortest=new_tokens,
    )
