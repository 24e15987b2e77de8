"""The ops that `python -m benchmarks tune` times: their shapes, operands and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.elementwise import token_ids
from benchmarks.shapes import ROWS, VOCABULARY, WEIGHTS
from rl_consistency.kernels.core.tuned_schedules import schedule_name
from rl_consistency.kernels.glu import activation_triton as glu
from rl_consistency.kernels.gradient_fold import rows_triton as fold_rows
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.rms_norm import schedules as rms_norm
from rl_consistency.kernels.rms_norm.backward_triton import rms_norm_bwd
from rl_consistency.kernels.rms_norm.forward_triton import rms_norm_fwd
from rl_consistency.kernels.rotary import rotation_triton as rotary
from rl_consistency.kernels.sampling import statistics_triton as vocabulary
from rl_consistency.kernels.token_logprobs import backward_triton as logprobs_backward
from rl_consistency.kernels.token_logprobs import schedules as logprobs
from rl_consistency.kernels.token_logprobs.forward_triton import token_statistics
from rl_consistency.kernels.token_logprobs.op import IGNORED
from rl_consistency.tuning.products import fold, product
from rl_consistency.tuning.work import Op, Work

BF16 = torch.bfloat16
FOLD_SHAPES = (
    (4096, 4096, 4096), (8192, 6144, 4096), (16384, 3072, 1024), (16384, 1024, 3072),
    (16384, 2048, 2048), (16384, 12288, 4096),
)  # fmt: skip
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


def _normals(device: torch.device, *shapes: Sequence[int]) -> Callable[[], tuple[Tensor, ...]]:
    """Makes operands of these shapes."""
    return lambda: tuple(normal(device, *shape) for shape in shapes)


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
    """dW from zero."""
    for shape in FOLD_SHAPES:
        yield fold(device, *shape, BF16)


def norm_works(device: torch.device) -> Iterator[Work]:
    """RMSNorm of hidden states, with and without the residual addition, and of heads."""

    def operands(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        x, other, dy = (normal(device, *shape) for _ in range(3))
        weight = torch.rand(shape[-1], dtype=BF16, device=device) + 0.5
        return x, other, dy, weight, torch.rand(x.numel() // shape[-1], device=device)

    def forward(x: Tensor, other: Tensor, *rest: Tensor, residual: bool, schedule: Any) -> Any:
        return rms_norm_fwd(x, other if residual else None, rest[1], 1e-6, schedule)

    def backward(
        x: Tensor, other: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor, residual: bool,
        heads: int, schedule: Any,
    ) -> Any:  # fmt: skip
        chosen = None if schedule is rms_norm.NARROW else schedule
        dtotal = other if residual else None
        dx, sums = rms_norm_bwd(dy, dtotal, x, weight, rstd, heads, True, chosen)
        return dx, folded_step_sums(sums, BF16)

    shapes = [(shape, residual) for shape in NORM_SHAPES for residual in (False, True)]
    for shape, residual in [*shapes, *((shape, False) for shape in HEAD_SHAPES)]:
        width, heads = shape[-1], shape[1] if len(shape) == 3 else 1
        name = "add_rms_norm" if residual else "rms_norm"
        sizes = ("rows heads width", (shape[0], heads, width), partial(operands, shape))
        schedules, picked = rms_norm.candidates(width), rms_norm.pick_forward(width)
        call = partial(forward, residual=residual)
        yield _work(f"{name} forward", *sizes, schedules, call, picked)
        narrow = rms_norm.is_narrow(width, heads)
        picked = rms_norm.NARROW if narrow else rms_norm.pick_backward(width, heads)
        schedules = list(dict.fromkeys([picked, *rms_norm.candidates(width, heads)]))
        call = partial(backward, residual=residual, heads=heads)
        yield _work(f"{name} backward", *sizes, schedules, call, picked)


def rotary_works(device: torch.device) -> Iterator[Work]:
    """Rotation of queries and keys; the backward pass is the same kernel, the sine negated."""

    def operands(tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
        q, k = normal(device, tokens, heads, dim), normal(device, tokens, kv_heads, dim)
        return q, k, *torch.rand(2, tokens, dim // 2, device=device).unbind(0)

    call = partial(rotary.rotary_fwd, inverse=False)
    for shape in ROTARY_SHAPES:
        sizes = ("tokens heads kv_heads head_dim", shape, partial(operands, *shape))
        yield _work("rotary", *sizes, rotary.CANDIDATES, call, rotary.SCHEDULE)


def glu_works(device: torch.device) -> Iterator[Work]:
    """SwiGLU, forward and backward."""

    def forward(gate: Tensor, up: Tensor, schedule: Any) -> Tensor:
        return glu.glu_fwd(gate, up, "silu", schedule)

    def backward(dy: Tensor, gate: Tensor, up: Tensor, schedule: Any) -> Any:
        return glu.glu_bwd(dy, gate, up, "silu", schedule)

    for shape in GLU_SHAPES:
        for name, call, count in (("forward", forward, 2), ("backward", backward, 3)):
            made = _normals(device, *[shape] * count)
            schedules = glu.CANDIDATES
            yield _work(f"glu {name}", "tokens width", shape, made, schedules, call, glu.SCHEDULE)


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
    """The LM head's block statistics, and its logit gradients for one chunk of tokens."""

    def operands(tokens: int, width: int) -> tuple[Tensor, ...]:
        weight = torch.randn(VOCABULARY, width, dtype=BF16, device=device) * width**-0.5
        return normal(device, tokens, width), weight, torch.ones(tokens, device=device)

    def statistics(hidden: Tensor, weight: Tensor, divisor: Tensor, schedule: str) -> Tensor:
        if schedule != logprobs.UNFUSED:
            return token_statistics(hidden, weight, divisor, True, schedule)
        pieces = [
            vocabulary.vocabulary_row_statistics(matmul_nt(h, weight), divisor[: len(h)], True)
            for h in hidden.split(weight.shape[1])
        ]
        return torch.cat(pieces, dim=2)

    def gradient_operands(width: int) -> tuple[Tensor, ...]:
        hidden, weight, divisor = operands(width, width)
        partials = token_statistics(hidden, weight, divisor, True, "tma")
        top, normalizer, entropy = vocabulary.vocabulary_combine(partials)
        dlogprobs, dentropy = torch.randn(2, width, device=device).unbind(0)
        targets = torch.randint(VOCABULARY, (width,), device=device)
        table = logprobs_backward.token_gradient_table(
            divisor, top, normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
        )
        return hidden, weight, table, weight.new_empty(width, VOCABULARY)

    def gradient(
        hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor, schedule: str
    ) -> Tensor:
        if schedule == logprobs.UNFUSED:
            logprobs_backward.token_row_gradient(matmul_nt(hidden, weight), table, room, True)
        else:
            logprobs_backward.token_gradient(hidden, weight, table, room, True, schedule)
        return room

    def tiled(schedules: Mapping[str, Any]) -> list[str]:
        found = [name for name, schedule in schedules.items() if schedule.kind == "tma"]
        return [*found, logprobs.UNFUSED]

    head, sizes = "token_logprobs", "rows width"
    for shape in LOGPROB_SHAPES:
        made, schedules = partial(operands, *shape), tiled(logprobs.STATISTICS_SCHEDULES)
        yield _work(f"{head} statistics", sizes, shape, made, schedules, statistics, "tma")
        width = shape[1]
        made, schedules = partial(gradient_operands, width), tiled(logprobs.GRADIENT_SCHEDULES)
        yield _work(f"{head} gradient", sizes, (width, width), made, schedules, gradient, "tma")


OPS: dict[str, Callable[[torch.device], Iterator[Work]]] = {
    "matmul": matmul_works,
    "fold": fold_works,
    "rms_norm": norm_works,
    "rotary": rotary_works,
    "glu": glu_works,
    "embedding": embedding_works,
    "token_logprobs": logprobs_works,
}
