"""The ops that `python -m benchmarks tune` times: their shapes, operands and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.elementwise import token_ids
from benchmarks.shapes import FOLDS, ROWS, VOCABULARY, WEIGHTS
from rl_consistency.kernels.core.findings import schedule_name
from rl_consistency.kernels.gradient_fold import rows_triton as fold_rows
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.rms_norm import schedules as rms_norm
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd
from rl_consistency.kernels.sampling import statistics_triton as vocabulary
from rl_consistency.kernels.token_logprobs import head_triton as logprobs_head
from rl_consistency.kernels.token_logprobs import schedules as logprobs
from rl_consistency.tuning.products import fold, product
from rl_consistency.tuning.row_ops import (
    glu_work,
    head_gradient,
    head_statistics,
    norm_backward,
    norm_forward,
    rotary_work,
)
from rl_consistency.tuning.work import Op, Work

BF16 = torch.bfloat16
NORM_SHAPES = ((8192, 4096), (16384, 4096), (8192, 1024), (16384, 1024), (16384, 2048))
HEAD_SHAPES = ((16384, 16, 128), (16384, 8, 128))
ROTARY_SHAPES = ((16384, 16, 8, 128), (8192, 32, 8, 128))
GLU_SHAPES = ((16384, 3072), (8192, 14336))
EMBEDDING_SHAPES = ((8192, 4096), (16384, 1024))
LOGPROB_SHAPES = ((8192, 1024), (8192, 2048), (8192, 4096))


def normal(device: torch.device, *shape: int) -> Tensor:
    """Normal values in bf16 whose every 37th column is an outlier."""
    values = torch.randn(shape, device=device, dtype=BF16)
    values[..., ::37] *= 30
    return values


def _work(
    op: str, sizes: str, shape: Sequence[Any], operands: Callable[[], tuple[Tensor, ...]],
    schedules: Sequence[Any], call: Op, picked: Any, **others: Op,
) -> Work:  # fmt: skip
    """A work of `schedules`; `call` takes the operands and `schedule`."""
    return Work(
        op=op,
        shape=dict(zip(sizes.split(), shape, strict=True)),
        operands=operands,
        candidates={schedule_name(s): partial(call, schedule=s) for s in schedules},
        picked=schedule_name(picked),
        others=others,
    )


def matmul_works(device: torch.device) -> Iterator[Work]:
    """y = x W^T ("nt") and dx = dy W ("nn") at every shape of the bench."""
    for m, layout, weight in itertools.product(ROWS, ("nt", "nn"), WEIGHTS):
        n, k = weight if layout == "nt" else weight[::-1]
        yield product(device, layout, m, n, k, BF16, BF16)


def fold_works(device: torch.device) -> Iterator[Work]:
    """dW continued in an fp32 gradient."""
    for shape in FOLDS:
        yield fold(device, *shape, BF16, fresh=False)


def norm_works(device: torch.device) -> Iterator[Work]:
    """RMSNorm of hidden states, with and without the residual addition, and of heads."""
    for (rows, width), adds in itertools.product(NORM_SHAPES, (False, True)):
        yield norm_forward(device, rows, width, BF16, adds=adds)
        yield norm_backward(device, rows, width, BF16, adds=adds)
    for tokens, heads, width in HEAD_SHAPES:
        yield norm_forward(device, tokens * heads, width, BF16)
        yield _head_norm_backward(device, tokens, heads, width)


def _head_norm_backward(device: torch.device, tokens: int, heads: int, width: int) -> Work:
    """The narrow kernel against the wide one."""

    def operands() -> tuple[Tensor, ...]:
        x, dy = (normal(device, tokens, heads, width) for _ in range(2))
        weight = torch.rand(width, dtype=BF16, device=device) + 0.5
        return x, dy, weight, torch.rand(tokens * heads, device=device)

    def backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor, schedule: Any) -> Any:
        chosen = None if schedule is rms_norm.NARROW else schedule
        dx, sums = rms_norm_bwd(dy, None, x, weight, rstd, heads, True, chosen)
        return dx, folded_step_sums(sums, BF16)

    schedules = [rms_norm.NARROW, *rms_norm.candidates(width, heads)]
    sizes = ("rows heads width", (tokens, heads, width), operands)
    return _work("rms_norm backward", *sizes, schedules, backward, rms_norm.NARROW)


def rotary_works(device: torch.device) -> Iterator[Work]:
    """Rotation of queries and keys."""
    for shape in ROTARY_SHAPES:
        yield rotary_work(device, *shape, BF16)


def glu_works(device: torch.device) -> Iterator[Work]:
    """SwiGLU, forward and backward."""
    for shape, direction in itertools.product(GLU_SHAPES, ("forward", "backward")):
        yield glu_work(device, direction, *shape, BF16, "silu")


def embedding_works(device: torch.device) -> Iterator[Work]:
    """Gradients of embedding rows added to a table."""

    def fold(rows: Tensor, ids: Tensor, table: Tensor, schedule: Any) -> Tensor:
        ranked = len(ids) <= fold_rows.RANKED_TOKENS
        fold_rows.launch_rows(table, ids, rows, schedule, ranked=ranked)
        return table

    def operands(tokens: int, width: int) -> tuple[Tensor, ...]:
        ids = token_ids(tokens, VOCABULARY, device)
        return normal(device, tokens, width), ids, torch.zeros(VOCABULARY, width, device=device)

    schedules = fold_rows.CANDIDATES
    for shape in EMBEDDING_SHAPES:
        sizes = ("tokens width", shape, partial(operands, *shape))
        yield _work("embedding backward", *sizes, schedules, fold, schedules[0])


def logprobs_works(device: torch.device) -> Iterator[Work]:
    """The LM head's block statistics, and its logit gradients for one chunk of tokens; beside the
    fused schedules, logits that are written to memory and read back."""

    def statistics(hidden: Tensor, weight: Tensor, divisor: Tensor) -> Tensor:
        pieces = [
            vocabulary.vocabulary_row_statistics(matmul_nt(h, weight), divisor[: len(h)], True)
            for h in hidden.split(weight.shape[1])
        ]
        return torch.cat(pieces, dim=2)

    def gradient(hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor) -> Tensor:
        written = room[:, :VOCABULARY]
        logprobs_head.token_row_gradient(matmul_nt(hidden, weight), table, written, True)
        return written

    for rows, width in LOGPROB_SHAPES:
        for work, unfused in (
            (head_statistics(device, rows, VOCABULARY, width, BF16), statistics),
            (head_gradient(device, width, VOCABULARY, width, BF16), gradient),
        ):
            yield replace(work, candidates={**work.candidates, logprobs.UNFUSED: unfused})


OPS: dict[str, Callable[[torch.device], Iterator[Work]]] = {
    "matmul": matmul_works,
    "fold": fold_works,
    "rms_norm": norm_works,
    "rotary": rotary_works,
    "glu": glu_works,
    "embedding": embedding_works,
    "token_logprobs": logprobs_works,
}
