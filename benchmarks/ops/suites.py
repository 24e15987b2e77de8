"""The suites of `python -m benchmarks ops`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.models import model_config
from benchmarks.ops.attention import attention_backward, attention_decode, attention_forward
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.experts import (
    experts_few,
    experts_forward,
    experts_gradient,
    moe_block,
)
from benchmarks.ops.logprobs import logprobs_and_gradients
from benchmarks.ops.matmul import gradient_fold, product, tuned_product
from benchmarks.ops.routing import ROUTINGS
from benchmarks.random_shapes import (
    draw_attention,
    draw_decode,
    draw_experts,
    draw_folds,
    draw_models,
    draw_products,
    draw_widths,
)
from benchmarks.shapes import BANDS, EXPERTS, HEADS, ROWS, VOCABULARY, WEIGHTS
from benchmarks.suite import Case, Suites, cases, of_seed
from benchmarks.timing import Machine
from rl_consistency.cases.case import TINY_SHAPES, OpShapes, shapes_of
from rl_consistency.verify.checks.accuracy import accuracy_rows

Sizes = Sequence[dict[str, Any]]


def op_suites() -> Suites:
    """Every op against its stock counterpart."""
    forward = [{"m": m, "n": n, "k": k} for n, k in WEIGHTS for m in ROWS]
    dx = [{"m": m, "n": n, "k": k} for k, n in WEIGHTS for m in ROWS]
    tokens = (1024, 2048, 4096, 8192, 16384)
    folds = [{"tokens": t, "n": n, "k": k} for n, k in WEIGHTS for t in tokens]
    lengths = (2048, 4096, 8192, 16384)
    prefill = [{"length": n, "batch": 16384 // n, "heads": h} for h in HEADS for n in lengths]
    paged = itertools.product(HEADS, (1, 4, 16, 64, 256), (2048, 8192, 32768))
    decode = [{"batch": b, "context": n, "heads": h} for h, b, n in paged]
    head = [{"tokens": 8192, "width": n, "vocabulary": VOCABULARY} for n in (1024, 2048, 4096)]
    return {
        "matmul_forward": cases("matmul forward", partial(product, "nt"), forward),
        "matmul_dx": cases("matmul dX", partial(product, "nn"), dx),
        "gradient_fold": cases("dW fold", gradient_fold, folds),
        "attention_forward": cases("attention forward", attention_forward, prefill),
        "attention_backward": cases("attention backward", attention_backward, prefill),
        "attention_decode": cases("attention decode", attention_decode, decode),
        "elementwise": elementwise_cases(((8192, 1024), (8192, 4096), (16384, 4096)), VOCABULARY),
        "token_logprobs": cases("token_logprobs forward + backward", logprobs_and_gradients, head),
        "accuracy": accuracy_cases(TINY_SHAPES, _sizes_of("qwen3-0.6b")),
        **_expert_suites(),
    }


def random_op_suites(seed: int) -> Suites:
    """Ops against their stock counterparts at shapes drawn by a seed; products in graphs whatever
    their rows."""
    drawn = [shape for band in BANDS for shape in draw_products(seed, 12, band)]
    graph_rows = BANDS[-1][1]
    products, tuned = (
        [
            case
            for layout, work in (("nt", "matmul forward"), ("nn", "matmul dX"))
            for case in cases(
                work,
                partial(run, layout, graph_rows=graph_rows),
                [{size: x[size] for size in "mnk"} for x in drawn if x["layout"] == layout],
            )
        ]
        for run in (product, tuned_product)
    )
    attention, widths = draw_attention(seed, 2), draw_widths(seed, 3)
    elementwise = [
        case
        for x in widths
        for case in elementwise_cases([(x["tokens"], x["width"])], x["vocabulary"])
    ]
    suites = {
        "matmul": products,
        "matmul_tuned": tuned,
        "gradient_fold": cases("dW fold", gradient_fold, draw_folds(seed, 24)),
        "attention_forward": cases("attention forward", attention_forward, attention),
        "attention_backward": cases("attention backward", attention_backward, attention),
        "attention_decode": cases("attention decode", attention_decode, draw_decode(seed, 3)),
        "elementwise": elementwise,
        "token_logprobs": cases(
            "token_logprobs forward + backward", logprobs_and_gradients, widths
        ),
        "accuracy": accuracy_cases(*map(_sizes_of, draw_models(seed, 1))),
        **_random_expert_suites(seed),
    }
    return of_seed(seed, suites)


def _expert_suites() -> Suites:
    """Every family's shape under every routing."""

    def sizes(name: str, values: Sequence[int], **more: int) -> list[dict[str, Any]]:
        every = itertools.product(EXPERTS.values(), values, ROUTINGS)
        return [{name: v, **more, **shape, "routing": routing} for shape, v, routing in every]

    blocks = [
        {"family": family, "tokens": tokens, **shape, "routing": routing}
        for family, shape in EXPERTS.items()
        for tokens, routing in itertools.product((4096, 16384), ROUTINGS)
    ]
    lengths = sizes("length", (256, 1024, 4096), tokens=16384)
    return _of_experts(
        sizes("tokens", (2048, 4096, 16384)), sizes("tokens", (1, 8, 64, 256)), lengths, blocks
    )


def _random_expert_suites(seed: int) -> Suites:
    """Drawn shapes, the routings by turns."""

    def sizes(count: int, rows: tuple[int, int], **more: Any) -> list[dict[str, Any]]:
        drawn = draw_experts(seed, count, rows)
        turns = zip(drawn, itertools.cycle(ROUTINGS))
        return [{**more, **shape, "routing": routing} for shape, routing in turns]

    many = (2048, 16384)
    lengths = [x for n in (1024, 4096) for x in sizes(3, (16384, 16384), length=n)]
    return _of_experts(
        sizes(6, many), sizes(9, (1, 256)), lengths, sizes(3, many, family="qwen3_moe")
    )


def _of_experts(
    many: Sizes, few: Sizes, lengths: Sizes, blocks: Sizes
) -> dict[str, Sequence[Case]]:
    """The suites of mixtures of experts at these sizes."""
    return {
        "experts_forward": cases("experts", experts_forward, many),
        "experts_few": cases("experts", experts_few, few),
        "experts_gradient": cases("dW of experts", experts_gradient, lengths),
        "moe_block": cases("MoE block forward + backward", moe_block, blocks),
    }


def accuracy_cases(*sizes: OpShapes) -> list[Case]:
    """Claim C6 as figures: the error of every op against fp64 over that of the stock op."""
    return [
        Case(
            work="accuracy",
            shape={"sizes": size.name or "small"},
            dtype=str(dtype).removeprefix("torch."),
            run=partial(_accuracy, dtype, size),
        )
        for size in sizes
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _sizes_of(model: str) -> OpShapes:
    return shapes_of(model, model_config(model))


def _accuracy(dtype: torch.dtype, size: OpShapes, bench: Machine) -> dict[str, Any]:
    """The highest error ratio, and that of each op."""
    found: dict[str, list[float]] = {}
    for row in accuracy_rows(bench.device, (dtype,), size):
        found.setdefault(row.op, []).append(row.ratio)
    figures = {op: _highest(each) for op, each in found.items()}
    return {"error_ratio": _highest(figures.values()), "figures": figures}


def _highest(values: Iterable[float]) -> float:
    """The highest value, or NaN if one is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)
