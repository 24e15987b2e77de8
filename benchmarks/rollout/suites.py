"""The suites of `python -m benchmarks rollout`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.models import is_sparse
from benchmarks.recipe import MICRO_BATCH, grpo_step
from benchmarks.rollout.copying import SPECULATION, copying
from benchmarks.rollout.decoding import long_context, shared_keys, steady_step
from benchmarks.rollout.hugging_face import GENERATE, GENERATE_BATCH, hugging_face
from benchmarks.rollout.processes import MODEL, WORK, cold_start, tune_policy
from benchmarks.rollout.workload import Workload
from benchmarks.shapes import draw_models, draw_workloads
from benchmarks.suite import Case, Suites, cases, of_seed

SMALL, MIDDLE, LARGE = "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"
GROUPED = (SMALL, "qwen2.5-1.5b", LARGE)
"""Models of 2, 6 and 4 query heads to a KV head."""


def _case(
    work: str, run: Callable[..., dict[str, Any]], model: str, workload: Workload,
    *arguments: Any, **more: int,
) -> Case:  # fmt: skip
    """A row of a model on a workload; `more` is what else its shape says."""
    shape = {"model": model, **workload.shape, **more}
    return Case(work=work, shape=shape, run=partial(run, model, workload, *arguments))


def rollout_suites() -> Suites:
    """What is measured without options."""
    equal = Workload.equal
    generate, batched = equal(32, 8, 512, 128), equal(32, 8, 512, 32)
    roofline = [equal(batch, 1, 960, 96) for batch in (64, 128, 256)]
    # The smallest model: its steps leave the host the least time.
    idle = [equal(groups, 8, 512, 128) for groups in (4, 8, 32)]
    long = equal(32, 8, 2048, 64)
    copies = [equal(batch, 1, 513, 512) for batch in (1, 8)]
    context = {"long": 32768, "short": 1024, "new_tokens": 64}
    edit = partial(_case, "edit a text", copying, SMALL, speculation=SPECULATION)
    return {
        "rollout_roofline": [_case("decode step", steady_step, LARGE, w) for w in roofline],
        "rollout_idle": [_case("decode step", steady_step, SMALL, w) for w in idle],
        "rollout_roofline_one": [_case("decode step", steady_step, LARGE, equal(1, 1, 960, 96))],
        "rollout_shared_keys": [_case("decode step", shared_keys, name, long) for name in GROUPED],
        "rollout_hugging_face": [
            _case("generate", hugging_face, SMALL, generate, GENERATE),
            _case("generate_batch", hugging_face, SMALL, batched, GENERATE_BATCH),
            _case("generate", hugging_face, MIDDLE, generate, GENERATE),
        ],
        "rollout_speculation": [edit(workload) for workload in copies],
        "rollout_long_context": cases("one sequence", long_context, [{"model": SMALL, **context}]),
        "rollout_grpo_step": [
            _case("GRPO step", grpo_step, SMALL, equal(8, 8, 256, 256), micro_batch=MICRO_BATCH)
        ],
        "rollout_cold_start": [_case("first token", cold_start, MODEL, WORK)],
        "rollout_tune": cases("tune", tune_policy, [{"model": LARGE}]),
    }


def named_rollout_suites(models: Sequence[str]) -> Suites:
    """The suites of `--model`: decode steps, those of mixtures of experts in a suite of their own;
    ValueError on a name that `model_config` refuses."""
    sparse = [model for model in models if is_sparse(model)]
    found: dict[str, list[Case]] = {}
    for model in models:
        name, batches = "rollout_roofline_named", (64, 256)
        if model in sparse:
            name, batches = "rollout_roofline_sparse", (1, 8, 32, 64, 256)
        works = [Workload.equal(batch, 1, 960, 64) for batch in batches]
        found.setdefault(name, []).extend(
            _case("decode step", steady_step, model, work) for work in works
        )
    return found


def random_rollout_suites(seed: int) -> Suites:
    """Decode steps of small dense models and workloads drawn by a seed, no prompt shared."""
    pairs = zip(draw_models(seed, 2), draw_workloads(seed, 2), strict=True)
    found = [
        _case(
            "decode step",
            steady_step,
            model,
            Workload.equal(drawn["groups"], 1, drawn["prompt_len"], 64),
        )
        for model, drawn in pairs
    ]
    return of_seed(seed, {"rollout_roofline": found})
