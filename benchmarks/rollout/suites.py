"""The suites of `python -m benchmarks rollout`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.rollout.copying import SPECULATION, copying
from benchmarks.rollout.decoding import decode, long_context, steady_step
from benchmarks.rollout.grpo import MICRO_BATCH, grpo_step
from benchmarks.rollout.hugging_face import GENERATE, GENERATE_BATCH, hugging_face
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Case, Suite

BATCH, PROMPT_LEN, GROUP_SIZE = 256, 512, 8
SMALL, MIDDLE, LARGE = "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"


def own_suite(name: str, batch: int, prompt_len: int, new_tokens: int) -> Suite:
    """Decode throughput of any preset or model directory on the caller's sizes; no bar is over it.

    Raises:
        ValueError: a size below 1.
    """
    size = GROUP_SIZE if batch % GROUP_SIZE == 0 else 1
    workload = Workload(batch // size, size, prompt_len, new_tokens, min(32, new_tokens))
    return Suite("rollout_own", [_case("decode", decode, ModelShelf(), name, workload)])


def _case(
    work: str, run: Callable[..., dict[str, Any]], shelf: ModelShelf, name: str,
    workload: Workload, *arguments: Any, **more: int,
) -> Case:  # fmt: skip
    """A row of a model on a workload; `more` is what else its shape says."""
    shape = {"model": name, **workload.shape, **more}
    return Case(work=work, shape=shape, run=partial(run, shelf, name, workload, *arguments))


def rollout_suites(*, quick: bool = False) -> list[Suite]:
    """The suites that the bars are over; `quick` keeps small workloads of each."""
    shelf, equal = ModelShelf(), Workload.equal
    groups = 8 if quick else BATCH // GROUP_SIZE
    spread = Workload(groups, GROUP_SIZE, PROMPT_LEN, 256 if quick else 1024)
    generate = equal(groups, GROUP_SIZE, PROMPT_LEN, 16 if quick else 128)
    batched = equal(groups, GROUP_SIZE, PROMPT_LEN, 8 if quick else 32)
    grpo = equal(2 if quick else 8, GROUP_SIZE, 256, 64 if quick else 256)
    copied, long = (128, 8192) if quick else (512, 32768)

    first, *larger = (
        Suite(f"rollout_decode_{name}", [_case("decode", decode, shelf, name, spread)])
        for name in ((SMALL,) if quick else (SMALL, MIDDLE, LARGE))
    )
    roofline = [equal(batch, 1, 960, 32 if quick else 96) for batch in (64, 128, 256)]
    # The smallest model: its steps leave the host the least time.
    idle = [equal(n // GROUP_SIZE, GROUP_SIZE, PROMPT_LEN, 128) for n in (32, 64, 256)]
    copies = [equal(batch, 1, copied + 1, copied) for batch in (1, 8)]
    against = [
        _case("generate", hugging_face, shelf, SMALL, generate, GENERATE),
        _case("generate_batch", hugging_face, shelf, SMALL, batched, GENERATE_BATCH),
        _case("generate", hugging_face, shelf, MIDDLE, generate, GENERATE),
    ]
    one = Case(
        work="one sequence",
        shape={"model": SMALL, "long": long, "short": 1024, "new_tokens": 64},
        run=partial(long_context, shelf, SMALL, long, 1024, 64),
    )
    rounds = 1 if quick else 2
    step = _case("GRPO step", grpo_step, shelf, SMALL, grpo, rounds, micro_batch=MICRO_BATCH)
    few = slice(1 if quick else None)

    def steps(name: str, workloads: list[Workload]) -> list[Case]:
        return [_case("decode step", steady_step, shelf, name, w) for w in workloads[few]]

    edit = partial(_case, "edit a text", copying, shelf, SMALL, speculation=SPECULATION)
    return [
        first,
        Suite("rollout_roofline", steps(LARGE, roofline)),
        Suite("rollout_idle", steps(SMALL, idle)),
        Suite("rollout_hugging_face", against[: 2 if quick else 3]),
        Suite("rollout_speculation", [edit(workload) for workload in copies[few]]),
        Suite("rollout_long_context", [one]),
        Suite("rollout_grpo_step", [step]),
        *larger,  # stock ops take the longest here, and time may be short
    ]
