"""The suites of `python -m benchmarks ops`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.ops.attention import decode_cases, prefill_cases
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.logprobs import token_logprobs_cases
from benchmarks.ops.matmul import gradient_fold_cases, product_cases
from benchmarks.suite import Case, Suite
from benchmarks.timing import Machine
from rl_consistency.verify.checks.accuracy import accuracy_rows
from rl_consistency.verify.checks.op_setup import TINY_SHAPES, OpShapes, shapes_of
from rl_consistency.verify.presets import preset_config


def op_suites(*, quick: bool = False) -> list[Suite]:
    """Every op against its stock counterpart; `quick` keeps a few shapes of each."""
    # Every fourth weight and row count still span small to large.
    fourth, second = (4, 2) if quick else (1, 1)
    weights, rows = shapes.WEIGHTS[::fourth], shapes.ROWS[::fourth]
    tokens, lengths = shapes.FOLD_TOKENS[::second], shapes.PREFILL_LENGTHS[::second]
    batches = shapes.DECODE_BATCHES[::second]
    contexts = shapes.DECODE_CONTEXTS[: 1 if quick else None]
    heads = shapes.HEADS[-1 if quick else 0 :]
    row_shapes = shapes.ROW_SHAPES[1:2] if quick else shapes.ROW_SHAPES
    widths = shapes.LOGPROB_WIDTHS[-1 if quick else 0 :]
    prefill = partial(prefill_cases, heads=heads, lengths=lengths, tokens=shapes.PREFILL_TOKENS)
    logprobs = token_logprobs_cases(shapes.LOGPROB_TOKENS, widths, shapes.VOCABULARY)
    return [
        Suite("matmul_forward", product_cases("nt", weights, rows)),
        Suite("matmul_dx", product_cases("nn", weights, rows)),
        Suite("gradient_fold", gradient_fold_cases(weights, tokens)),
        Suite("attention_forward", prefill("attention forward")),
        Suite("attention_backward", prefill("attention backward")),
        Suite("attention_decode", decode_cases(heads, batches, contexts)),
        Suite("elementwise", elementwise_cases(row_shapes)),
        Suite("token_logprobs", logprobs),
        Suite("accuracy", accuracy_cases(() if quick else ("qwen3-0.6b",))),
    ]


def accuracy_cases(models: tuple[str, ...]) -> list[Case]:
    """Claim C6 as figures: the error of every op against fp64 over that of the stock op."""
    sizes = [TINY_SHAPES, *(shapes_of(name, preset_config(name)) for name in models)]
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


def _accuracy(dtype: torch.dtype, size: OpShapes, bench: Machine) -> dict[str, Any]:
    """The highest error ratio, and that of each op."""
    figures: dict[str, float] = {}
    for row in accuracy_rows(bench.device, (dtype,), size):
        figures[row.op] = max(row.ratio, figures.get(row.op, 0.0))
    return {"error_ratio": max(figures.values()), "figures": figures}
