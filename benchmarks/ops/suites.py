"""The suites of `python -m benchmarks ops`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.ops.dense import (
    attention,
    attention_decode,
    gradient_fold,
    logprobs_and_gradients,
    product,
    tuned_product,
)
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.experts import (
    ROUTINGS,
    experts_few,
    experts_forward,
    experts_gradient,
    moe_block,
)
from benchmarks.shapes import (
    BANDS,
    EXPERTS,
    HEADS,
    ROWS,
    VOCABULARY,
    WEIGHTS,
    draw_attention,
    draw_decode,
    draw_experts,
    draw_folds,
    draw_products,
    draw_widths,
)
from benchmarks.suite import Case, Suites, cases, of_seed

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
    widths = ((8192, 1024), (8192, 4096), (16384, 4096))
    head = [{"tokens": 8192, "width": n, "vocabulary": VOCABULARY} for n in (1024, 2048, 4096)]
    every = [shape | {"routing": r} for shape in EXPERTS.values() for r in ROUTINGS]
    blocks = [
        {"family": family, **shape, "routing": routing}
        for family, shape in EXPERTS.items()
        for routing in ROUTINGS
    ]
    return {
        "matmul_forward": cases("matmul forward", partial(product, "nt"), forward),
        "matmul_dx": cases("matmul dX", partial(product, "nn"), dx),
        **_dense(folds, prefill, decode),
        "elementwise": [case for sizes in widths for case in elementwise_cases(*sizes, VOCABULARY)],
        **_logprobs(head),
        **_experts(
            [{"tokens": t} | shape for shape in every for t in (2048, 4096, 16384)],
            [{"tokens": t} | shape for shape in every for t in (1, 8, 64, 256)],
            [{"length": n, "tokens": 16384} | s for s in every for n in (256, 1024, 4096)],
            [{"tokens": t} | shape for shape in blocks for t in (4096, 16384)],
        ),
    }


def random_op_suites(seed: int) -> Suites:
    """Ops against their stock counterparts at shapes drawn by a seed; products in graphs whatever
    their rows."""
    drawn = [shape for band in BANDS for shape in draw_products(seed, 12, band)]

    def products(run: Any) -> list[Case]:
        return [
            case
            for layout, work in (("nt", "matmul forward"), ("nn", "matmul dX"))
            for case in cases(
                work,
                partial(run, layout, graph_rows=BANDS[-1][1]),
                [{size: x[size] for size in "mnk"} for x in drawn if x["layout"] == layout],
            )
        ]

    def routed(count: int, rows: tuple[int, int], **more: Any) -> Sizes:
        """Drawn mixtures of experts, the routings by turns."""
        turns = zip(draw_experts(seed, count, rows), itertools.cycle(ROUTINGS))
        return [{**more, **shape, "routing": routing} for shape, routing in turns]

    widths, many = draw_widths(seed, 3), (2048, 16384)
    suites = {
        "matmul": products(product),
        "matmul_tuned": products(tuned_product),
        **_dense(draw_folds(seed, 24), draw_attention(seed, 2), draw_decode(seed, 3)),
        "elementwise": [case for x in widths for case in elementwise_cases(*x.values())],
        **_logprobs(widths),
        **_experts(
            routed(6, many),
            routed(9, (1, 256)),
            [x for n in (1024, 4096) for x in routed(3, (16384, 16384), length=n)],
            routed(3, many, family="qwen3_moe"),
        ),
    }
    return of_seed(seed, suites)


def _dense(folds: Sizes, sequences: Sizes, decode: Sizes) -> dict[str, list[Case]]:
    return {
        "gradient_fold": cases("dW fold", gradient_fold, folds),
        "attention_forward": cases("attention forward", partial(attention, False), sequences),
        "attention_backward": cases("attention backward", partial(attention, True), sequences),
        "attention_decode": cases("attention decode", attention_decode, decode),
    }


def _logprobs(sizes: Sizes) -> dict[str, list[Case]]:
    work = "token_logprobs forward + backward"
    return {"token_logprobs": cases(work, logprobs_and_gradients, sizes)}


def _experts(many: Sizes, few: Sizes, lengths: Sizes, blocks: Sizes) -> dict[str, list[Case]]:
    return {
        "experts_forward": cases("experts", experts_forward, many),
        "experts_few": cases("experts", experts_few, few),
        "experts_gradient": cases("dW of experts", experts_gradient, lengths),
        "moe_block": cases("MoE block forward + backward", moe_block, blocks),
    }
