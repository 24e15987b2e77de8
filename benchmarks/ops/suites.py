"""The suites of `python -m benchmarks ops`."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from benchmarks.ops.attention import attention_backward, attention_decode, attention_forward
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.logprobs import logprobs_and_gradients
from benchmarks.ops.matmul import gradient_fold, product
from benchmarks.shapes import ROWS, VOCABULARY, WEIGHTS
from benchmarks.suite import Case, Suites, cases
from benchmarks.timing import Machine
from rl_consistency.verify.checks.accuracy import accuracy_rows
from rl_consistency.verify.checks.op_setup import TINY_SHAPES, OpShapes, shapes_of
from rl_consistency.verify.presets import preset_config


def op_suites() -> Suites:
    """Every op against its stock counterpart."""
    forward = [{"m": m, "n": n, "k": k} for n, k in WEIGHTS for m in ROWS]
    dx = [{"m": m, "n": n, "k": k} for k, n in WEIGHTS for m in ROWS]
    tokens = (1024, 2048, 4096, 8192, 16384)
    folds = [{"tokens": t, "n": n, "k": k} for n, k in WEIGHTS for t in tokens]
    # Query heads / key and value heads of the Qwen3 models up to 1.7B and of the 8B models.
    heads = ("16/8", "32/8")
    lengths = (2048, 4096, 8192, 16384)
    prefill = [{"length": n, "batch": 16384 // n, "heads": h} for h in heads for n in lengths]
    paged = itertools.product(heads, (1, 4, 16, 64, 256), (2048, 8192, 32768))
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
        "accuracy": accuracy_cases("qwen3-0.6b"),
    }


def accuracy_cases(model: str) -> list[Case]:
    """Claim C6 as figures: the error of every op against fp64 over that of the stock op, at small
    sizes and at those of a model."""
    return [
        Case(
            work="accuracy",
            shape={"sizes": size.name or "small"},
            dtype=str(dtype).removeprefix("torch."),
            run=partial(_accuracy, dtype, size),
        )
        for size in (TINY_SHAPES, shapes_of(model, preset_config(model)))
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _accuracy(dtype: torch.dtype, size: OpShapes, bench: Machine) -> dict[str, Any]:
    """The highest error ratio, and that of each op."""
    figures: dict[str, float] = {}
    for row in accuracy_rows(bench.device, (dtype,), size):
        figures[row.op] = max(row.ratio, figures.get(row.op, 0.0))
    return {"error_ratio": max(figures.values()), "figures": figures}
