"""The suites of `python -m benchmarks rollout`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.rollout.copying import SPECULATION, copying
from benchmarks.rollout.decoding import decode, long_context, steady_step
from benchmarks.rollout.grpo import MICRO_BATCH, grpo_step
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.others import GENERATE, GENERATE_BATCH, hugging_face, public_engines
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Case, Suite

BATCH, PROMPT_LEN, NEW_TOKENS, GROUP_SIZE = 256, 512, 1024, 8
SMALL, MIDDLE, LARGE = "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"
OWN = "rollout_own"
"""The suite of a caller's workload; no bar is over it."""


def case(
    work: str, run: Callable[..., dict[str, Any]], name: str, workload: Workload, **more: int
) -> Case:
    """A row of a model on a workload; `run` takes the machine."""
    return Case(work=work, shape={"model": name, **workload.shape, **more}, run=run)


def own_suite(name: str, batch: int, prompt_len: int, new_tokens: int) -> Suite:
    """Decode throughput of any preset or model directory on the caller's sizes.

    Raises:
        ValueError: a size below 1.
    """
    group_size = GROUP_SIZE if batch % GROUP_SIZE == 0 else 1
    workload = Workload(
        groups=batch // group_size,
        group_size=group_size,
        prompt_len=prompt_len,
        longest=new_tokens,
        shortest=min(32, new_tokens),
    )
    run = partial(decode, ModelShelf(), name, workload)
    return Suite(OWN, [case("decode", run, name, workload)])


def rollout_suites(*, quick: bool = False) -> list[Suite]:
    """The suites that the bars are over; `quick` keeps small workloads of each."""
    shelf = ModelShelf()

    def steady(name: str, workload: Workload) -> Case:
        return case("decode step", partial(steady_step, shelf, name, workload), name, workload)

    def copied(batch: int) -> Case:
        new_tokens = 128 if quick else 512
        workload = Workload.equal(batch, 1, new_tokens + 1, new_tokens)
        run = partial(copying, shelf, SMALL, workload)
        return case("edit a text", run, SMALL, workload, speculation=SPECULATION)

    public = Workload.equal(BATCH // GROUP_SIZE, GROUP_SIZE, PROMPT_LEN, 128)
    long = 8192 if quick else 32768
    context = {"model": SMALL, "long": long, "short": 1024, "new_tokens": 64}
    grpo = Workload.equal(2 if quick else 8, GROUP_SIZE, 256, 64 if quick else 256)
    step = partial(grpo_step, shelf, SMALL, grpo, 1 if quick else 2)
    first, *larger = _decode_suites(shelf, quick)
    return [
        first,
        Suite(
            "rollout_roofline",
            [
                steady(LARGE, Workload.equal(batch, 1, 960, 32 if quick else 96))
                for batch in ((64,) if quick else (64, 128, 256))
            ],
        ),
        Suite(
            "rollout_idle",
            [
                # The smallest model: its steps leave the host the least time.
                steady(SMALL, Workload.equal(batch // GROUP_SIZE, GROUP_SIZE, PROMPT_LEN, 128))
                for batch in ((32,) if quick else (32, 64, 256))
            ],
        ),
        _hugging_face_suite(shelf, quick),
        Suite(
            "rollout_public",
            [case("public engines", partial(public_engines, shelf, SMALL, public), SMALL, public)],
        ),
        Suite("rollout_speculation", [copied(batch) for batch in ((1,) if quick else (1, 8))]),
        Suite(
            "rollout_long_context",
            [
                Case(
                    work="one sequence",
                    shape=context,
                    run=partial(long_context, shelf, SMALL, long, 1024, 64),
                )
            ],
        ),
        Suite("rollout_grpo_step", [case("GRPO step", step, SMALL, grpo, micro_batch=MICRO_BATCH)]),
        *larger,  # stock ops take the longest here, and time may be short
    ]


def _decode_suites(shelf: ModelShelf, quick: bool) -> list[Suite]:
    """One suite for each shape, so that each can be measured by itself."""
    workload = Workload(
        groups=8 if quick else BATCH // GROUP_SIZE,
        group_size=GROUP_SIZE,
        prompt_len=PROMPT_LEN,
        longest=256 if quick else NEW_TOKENS,
    )
    return [
        Suite(
            f"rollout_decode_{name}",
            [case("decode", partial(decode, shelf, name, workload), name, workload)],
        )
        for name in ((SMALL,) if quick else (SMALL, MIDDLE, LARGE))
    ]


def _hugging_face_suite(shelf: ModelShelf, quick: bool) -> Suite:
    groups = 8 if quick else BATCH // GROUP_SIZE
    generate = Workload.equal(groups, GROUP_SIZE, PROMPT_LEN, 16 if quick else 128)
    batched = Workload.equal(groups, GROUP_SIZE, PROMPT_LEN, 8 if quick else 32)
    chosen = [
        (SMALL, generate, "generate", GENERATE),
        (SMALL, batched, "generate_batch", GENERATE_BATCH),
        (MIDDLE, generate, "generate", GENERATE),
    ]
    return Suite(
        "rollout_hugging_face",
        [
            case(work, partial(hugging_face, shelf, name, workload, ways), name, workload)
            for name, workload, work, ways in chosen[: 2 if quick else 3]
        ],
    )
