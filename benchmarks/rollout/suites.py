"""The suites of `python -m benchmarks rollout`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any

from benchmarks.models import is_sparse
from benchmarks.recipe import grpo_step
from benchmarks.rollout.calls import call_cost
from benchmarks.rollout.decoding import steady_step
from benchmarks.rollout.engines import hugging_face_cases, vllm_suites
from benchmarks.rollout.processes import cold_start
from benchmarks.rollout.workload import Workload
from benchmarks.shapes import draw_models, rows
from benchmarks.suite import Case, Choice, Suites

SMALL, MIDDLE, LARGE, GROUPED = "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen2.5-1.5b"
TINY = "tiny-qwen3"
equal = Workload.equal


def _case(work: str, run: Callable[..., Any], model: str, each: Workload) -> Case:
    """A row of a model on a workload."""
    return Case(work=work, shape={"model": model, **each.shape}, run=partial(run, model, each))


def _steps(models: Iterable[str], *works: Workload) -> list[Case]:
    return [_case("decode step", steady_step, name, each) for name in models for each in works]


def rollout_suites(choice: Choice) -> Suites:
    """Decode steps, generation beside others, cold starts and a whole GRPO step; or beside vLLM."""
    if choice.vllm is not None:
        return vllm_suites(choice)
    if choice.seed is not None:
        rng, found = Random(f"rollout {choice.seed}"), []
        for model in draw_models(choice.seed, 2):
            found += _steps([model], equal(rows(rng, 1, 256), 1, rows(rng, 100, 1000), 64))
        return {"rollout_roofline": found}
    if choice.models:
        sparse = [name for name in choice.models if is_sparse(name)]
        dense = [name for name in choice.models if name not in sparse]
        one = (equal(4, 1, 20, 16),) if choice.tiny else ()
        counts = {"named": (dense, (64, 256)), "sparse": (sparse, (1, 8, 32, 64, 256))}
        return {
            f"rollout_roofline_{kind}": _steps(models, *(one or [equal(n, 1, 960, 64) for n in of]))
            for kind, (models, of) in counts.items()
            if models
        }
    if choice.tiny:
        return {
            "rollout_roofline": _steps([TINY, "tiny-olmoe"], equal(2, 1, 20, 16)),
            "rollout_call": [_case("one token", call_cost, TINY, equal(1, 1, 4, 3))],
            "rollout_shared_keys": _steps([TINY], equal(1, 4, 20, 16)),
            "rollout_hugging_face": hugging_face_cases(TINY, equal(2, 1, 12, 6)),
            "rollout_grpo_step": [_case("GRPO step", grpo_step, TINY, equal(2, 4, 10, 6))],
            "rollout_cold_start": [_case("first token", cold_start, TINY, equal(1, 2, 12, 4))],
        }
    return {
        "rollout_roofline": _steps([LARGE], *(equal(n, 1, 960, 96) for n in (64, 128, 256))),
        "rollout_roofline_one": _steps([LARGE], equal(1, 1, 960, 96)),
        "rollout_call": [
            _case("one token", call_cost, name, equal(1, 1, 64, 65)) for name in (SMALL, LARGE)
        ],
        "rollout_long_context": _steps([SMALL], *(equal(1, 1, n, 64) for n in (960, 32704))),
        # Models of 2, 6 and 4 query heads to a KV head.
        "rollout_shared_keys": _steps([SMALL, GROUPED, LARGE], equal(32, 8, 2048, 64)),
        "rollout_hugging_face": [
            *hugging_face_cases(SMALL, equal(32, 8, 512, 128)),
            *hugging_face_cases(MIDDLE, equal(32, 8, 512, 128)),
        ],
        "rollout_grpo_step": [_case("GRPO step", grpo_step, SMALL, equal(8, 8, 256, 256))],
        # 500 is no multiple of a block: a prompt that is known leaves a few tokens to compute.
        "rollout_cold_start": [_case("first token", cold_start, GROUPED, equal(8, 8, 500, 32))],
    }
