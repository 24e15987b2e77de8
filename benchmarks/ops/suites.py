"""The suites of `rl-consistency bench ops`."""

from __future__ import annotations

import torch

from benchmarks import shapes
from benchmarks.ops.accuracy import accuracy_cases
from benchmarks.ops.attention import decode_cases, prefill_cases
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.logprobs import token_logprobs_cases
from benchmarks.ops.matmul import (
    forward_cases,
    gradient_fold_cases,
    input_gradient_cases,
)
from benchmarks.suite import Suite


def op_suites(*, quick: bool = False) -> list[Suite]:
    """Every op against its stock counterpart; `quick` keeps a few shapes of each."""
    # Every fourth weight and row count still span small to large.
    weights = shapes.WEIGHTS[::4] if quick else shapes.WEIGHTS
    rows = shapes.ROWS[::4] if quick else shapes.ROWS
    tokens = shapes.FOLD_TOKENS[::2] if quick else shapes.FOLD_TOKENS
    lengths = shapes.PREFILL_LENGTHS[::2] if quick else shapes.PREFILL_LENGTHS
    batches = shapes.DECODE_BATCHES[::2] if quick else shapes.DECODE_BATCHES
    contexts = shapes.DECODE_CONTEXTS[:1] if quick else shapes.DECODE_CONTEXTS
    heads = shapes.HEADS[-1:] if quick else shapes.HEADS
    row_shapes = shapes.ROW_SHAPES[1:2] if quick else shapes.ROW_SHAPES
    widths = shapes.LOGPROB_WIDTHS[-1:] if quick else shapes.LOGPROB_WIDTHS
    models = () if quick else ("qwen3-0.6b",)
    return [
        Suite("matmul_forward", "y = x W^T against cuBLAS", forward_cases(weights, rows)),
        Suite("matmul_dx", "dx = dy W against cuBLAS", input_gradient_cases(weights, rows)),
        Suite(
            "gradient_fold",
            "dW continued in fp32 against cuBLAS fp32-out + add",
            gradient_fold_cases(weights, tokens),
        ),
        *(
            Suite(
                f"attention_{direction}",
                f"causal prefill {direction}, D = {shapes.HEAD_DIM}, against SDPA",
                prefill_cases(f"attention {direction}", heads, lengths, shapes.PREFILL_TOKENS),
            )
            for direction in ("forward", "backward")
        ),
        Suite(
            "attention_decode",
            "one token from a paged cache against SDPA on contiguous tensors",
            decode_cases(heads, batches, contexts),
        ),
        Suite(
            "elementwise",
            "norms, rotary, SwiGLU, embedding against eager torch",
            elementwise_cases(row_shapes),
        ),
        Suite(
            "token_logprobs",
            "forward + backward against log_softmax of full logits",
            token_logprobs_cases(shapes.LOGPROB_TOKENS, widths, shapes.VOCABULARY),
        ),
        Suite(
            "accuracy",
            "error against fp64 over stock's",
            accuracy_cases(models, (torch.float32, torch.bfloat16)),
        ),
    ]
