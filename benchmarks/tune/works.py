"""The ops that `python -m benchmarks tune` times: their shapes, operands and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import ROWS, VOCABULARY, WEIGHTS
from benchmarks.timing import library_defaults
from benchmarks.tune.harness import Op, Way, Work, label
from rl_consistency.kernels.core.device import has_tma, sm_count
from rl_consistency.kernels.glu import activation_triton as glu
from rl_consistency.kernels.gradient_fold import rows_triton as fold_rows
from rl_consistency.kernels.gradient_fold import schedules as fold_outer
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer
from rl_consistency.kernels.matmul import schedules as matmul
from rl_consistency.kernels.matmul.cublaslt import library_product
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.rms_norm import schedules as rms_norm
from rl_consistency.kernels.rms_norm.backward_triton import rms_norm_bwd
from rl_consistency.kernels.rms_norm.forward_triton import rms_norm_fwd
from rl_consistency.kernels.rotary import rotation_triton as rotary
from rl_consistency.kernels.sampling.statistics_triton import (
    vocabulary_combine,
    vocabulary_row_statistics,
)
from rl_consistency.kernels.token_logprobs import schedules as logprobs
from rl_consistency.kernels.token_logprobs.backward_triton import (
    token_gradient,
    token_gradient_table,
    token_row_gradient,
)
from rl_consistency.kernels.token_logprobs.forward_triton import token_statistics
from rl_consistency.kernels.token_logprobs.op import IGNORED
from rl_consistency.numerics.settings import numeric_settings

BF16 = torch.bfloat16
FOLD_SHAPES = (
    (4096, 4096, 4096),
    (8192, 6144, 4096),
    (16384, 3072, 1024),
    (16384, 1024, 3072),
    (16384, 2048, 2048),
    (16384, 12288, 4096),
)
NORM_SHAPES = ((8192, 4096), (16384, 4096), (8192, 1024), (16384, 1024), (16384, 2048))
HEAD_SHAPES = ((16384, 16, 128), (16384, 8, 128))
ROTARY_SHAPES = ((16384, 16, 8, 128), (8192, 32, 8, 128))
GLU_SHAPES = ((16384, 3072), (8192, 14336))
EMBEDDING_SHAPES = ((8192, 4096), (16384, 1024))
LOGPROB_SHAPES = ((8192, 1024), (8192, 2048), (8192, 4096))


def normal(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal values whose every 37th column is an outlier."""
    values = torch.randn(shape, device=device, dtype=dtype)
    values[..., ::37] *= 30
    return values


def by_name(schedules: Iterable[Any], call: Callable[[Any], Op]) -> dict[str, Op]:
    """A candidate for each schedule."""
    return {label(schedule): call(schedule) for schedule in schedules}


def matmul_works(device: torch.device) -> Iterator[Work]:
    """y = x W^T ("nt") and dx = dy W ("nn") at every shape of the bench."""

    def operands(m: int, k: int, weight: tuple[int, int]) -> tuple[Tensor, ...]:
        return normal(device, m, k), normal(device, *weight)

    def product(schedule: Any, layout: str) -> Op:
        return lambda a, b: matmul_fwd(a, b, None, layout, BF16, schedule)

    def library(a: Tensor, b: Tensor, layout: str) -> Tensor:
        return library_product(a, b, None, layout, BF16)

    for m, layout, w in itertools.product(ROWS, ("nt", "nn"), WEIGHTS):
        n, k = (w.n, w.k) if layout == "nt" else (w.k, w.n)
        stock = partial(library, layout=layout)
        yield Work(
            op="matmul",
            shape={"layout": layout, "m": m, "n": n, "k": k},
            operands=partial(operands, m, k, (w.n, w.k)),
            candidates=by_name(matmul_candidates(m), partial(product, layout=layout)),
            picked=matmul.pick(m, n, k, BF16, layout, True).name,
            others={
                "cublas": Way(call=stock, context=library_defaults),
                "cublaslt": Way(call=stock, context=numeric_settings),
            },
        )


def matmul_candidates(m: int) -> list[Any]:
    """Schedules worth timing for a number of rows."""
    tiled = [s for s in matmul.CANDIDATES if s.kind == "tma"]
    if m <= 64:
        return [s for s in tiled if s.block_m <= max(16, m)]
    return [s for s in tiled if s.block_m >= 128 or (s.block_m == 64 and m <= 1024)]


def fold_works(device: torch.device) -> Iterator[Work]:
    """dW continued in an fp32 gradient."""
    tma = has_tma(device)

    def fold(schedule: Any) -> Op:
        def call(gradient: Tensor, dy: Tensor, x: Tensor) -> Tensor:
            launch_outer(gradient, dy, x, False, schedule)
            return gradient

        return call

    def operands(tokens: int, n: int, k: int) -> tuple[Tensor, ...]:
        gradient = normal(device, n, k, dtype=torch.float32)
        return gradient, normal(device, tokens, n), normal(device, tokens, k)

    for tokens, n, k in FOLD_SHAPES:
        picked = fold_outer.pick(tokens, n, k, BF16, tma=tma, processors=sm_count(device))
        yield Work(
            op="fold",
            shape={"tokens": tokens, "n": n, "k": k},
            operands=partial(operands, tokens, n, k),
            candidates=by_name(fold_outer.candidates(BF16, tma=tma), fold),
            picked=label(picked),
        )


def norm_works(device: torch.device) -> Iterator[Work]:
    """RMSNorm of hidden states, with and without the residual addition, and of heads."""

    def operands(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        x, other, dy = (normal(device, *shape) for _ in range(3))
        weight = torch.rand(shape[-1], dtype=BF16, device=device) + 0.5
        return x, other, dy, weight, torch.rand(x.numel() // shape[-1], device=device)

    def forward(schedule: Any, residual: bool) -> Op:
        return lambda x, other, dy, weight, rstd: rms_norm_fwd(
            x, other if residual else None, weight, 1e-6, schedule
        )

    def backward(schedule: Any, residual: bool, heads: int) -> Op:
        chosen = None if schedule is rms_norm.NARROW else schedule

        def call(x: Tensor, other: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> Any:
            dtotal = other if residual else None
            dx, sums = rms_norm_bwd(dy, dtotal, x, weight, rstd, heads, True, chosen)
            return dx, folded_step_sums(sums, BF16)

        return call

    shapes = [(shape, residual) for shape in NORM_SHAPES for residual in (False, True)]
    for shape, residual in [*shapes, *((shape, False) for shape in HEAD_SHAPES)]:
        width, heads = shape[-1], shape[1] if len(shape) == 3 else 1
        work = partial(
            Work,
            shape={"rows": shape[0], "heads": heads, "width": width},
            operands=partial(operands, shape),
        )
        name = "add_rms_norm" if residual else "rms_norm"
        call = partial(forward, residual=residual)
        yield work(
            op=f"{name} forward",
            candidates=by_name(rms_norm.candidates(width), call),
            picked=label(rms_norm.pick_forward(width)),
        )
        narrow = rms_norm.is_narrow(width, heads)
        picked = rms_norm.NARROW if narrow else rms_norm.pick_backward(width, heads)
        schedules = dict.fromkeys([picked, *rms_norm.candidates(width, heads)])
        call = partial(backward, residual=residual, heads=heads)
        yield work(op=f"{name} backward", candidates=by_name(schedules, call), picked=label(picked))


def rotary_works(device: torch.device) -> Iterator[Work]:
    """Rotation of queries and keys; the backward pass is the same kernel, the sine negated."""

    def operands(tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
        q, k = normal(device, tokens, heads, dim), normal(device, tokens, kv_heads, dim)
        return q, k, *torch.rand(2, tokens, dim // 2, device=device).unbind(0)

    for shape in ROTARY_SHAPES:
        yield Work(
            op="rotary",
            shape=dict(zip(("tokens", "heads", "kv_heads", "head_dim"), shape, strict=True)),
            operands=partial(operands, *shape),
            candidates=by_name(
                rotary.CANDIDATES,
                lambda s: lambda q, k, cos, sin: rotary.rotary_fwd(q, k, cos, sin, False, s),
            ),
            picked=label(rotary.SCHEDULE),
        )


def glu_works(device: torch.device) -> Iterator[Work]:
    """SwiGLU, forward and backward."""
    ways: dict[str, Callable[[Any], Op]] = {
        "forward": lambda s: lambda gate, up, dy: glu.glu_fwd(gate, up, "silu", s),
        "backward": lambda s: lambda gate, up, dy: glu.glu_bwd(dy, gate, up, "silu", s),
    }
    for shape in GLU_SHAPES:
        for direction, call in ways.items():
            yield Work(
                op=f"glu {direction}",
                shape={"tokens": shape[0], "width": shape[1]},
                operands=lambda shape=shape: tuple(normal(device, *shape) for _ in range(3)),
                candidates=by_name(glu.CANDIDATES, call),
                picked=label(glu.SCHEDULE),
            )


def embedding_works(device: torch.device) -> Iterator[Work]:
    """Gradients of embedding rows added to a table, ids as frequent as they are in text."""

    def fold(schedule: Any) -> Op:
        def call(table: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
            ranked = len(ids) <= fold_rows.RANKED_TOKENS
            fold_rows.launch_rows(table, ids, rows, schedule, ranked=ranked)
            return table

        return call

    def operands(tokens: int, width: int) -> tuple[Tensor, ...]:
        uniform = torch.rand(tokens, dtype=torch.float64, device=device)
        ids = (VOCABULARY**uniform).long().clamp(max=VOCABULARY - 1)
        return torch.zeros(VOCABULARY, width, device=device), ids, normal(device, tokens, width)

    for tokens, width in EMBEDDING_SHAPES:
        yield Work(
            op="embedding backward",
            shape={"tokens": tokens, "width": width},
            operands=partial(operands, tokens, width),
            candidates=by_name(fold_rows.CANDIDATES, fold),
            picked=label(fold_rows.CANDIDATES[0]),
        )


def logprobs_works(device: torch.device) -> Iterator[Work]:
    """The LM head's block statistics, and its logit gradients for one chunk of tokens."""

    def operands(tokens: int, width: int) -> tuple[Tensor, ...]:
        weight = torch.randn(VOCABULARY, width, dtype=BF16, device=device) * width**-0.5
        return normal(device, tokens, width), weight, torch.ones(tokens, device=device)

    def statistics(name: str) -> Op:
        return lambda hidden, weight, divisor: token_statistics(hidden, weight, divisor, True, name)

    def unfused_statistics(hidden: Tensor, weight: Tensor, divisor: Tensor) -> Tensor:
        pieces = [
            vocabulary_row_statistics(matmul_nt(h, weight), divisor[: len(h)], True)
            for h in hidden.split(weight.shape[1])
        ]
        return torch.cat(pieces, dim=2)

    def gradient_operands(width: int) -> tuple[Tensor, ...]:
        hidden, weight, divisor = operands(width, width)
        partials = token_statistics(hidden, weight, divisor, True, "tma")
        top, log_normalizer, entropy = vocabulary_combine(partials)
        dlogprobs, dentropy = torch.randn(2, width, device=device).unbind(0)
        targets = torch.randint(VOCABULARY, (width,), device=device)
        table = token_gradient_table(
            divisor, top, log_normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
        )
        return hidden, weight, table, weight.new_empty(width, VOCABULARY)

    def gradient(name: str) -> Op:
        def call(hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor) -> Tensor:
            token_gradient(hidden, weight, table, room, True, name)
            return room

        return call

    def unfused_gradient(hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor) -> Tensor:
        token_row_gradient(matmul_nt(hidden, weight), table, room, True)
        return room

    def tiled(table: Mapping[str, Any], call: Callable[[str], Op]) -> dict[str, Op]:
        return {name: call(name) for name, s in table.items() if s.kind == "tma"}

    for tokens, width in LOGPROB_SHAPES:
        forward = tiled(logprobs.STATISTICS_SCHEDULES, statistics)
        yield Work(
            op="token_logprobs statistics",
            shape={"rows": tokens, "width": width},
            operands=partial(operands, tokens, width),
            candidates=forward | {"unfused": unfused_statistics},
            picked="tma",
        )
        backward = tiled(logprobs.GRADIENT_SCHEDULES, gradient)
        yield Work(
            op="token_logprobs gradient",
            shape={"rows": width, "width": width},
            operands=partial(gradient_operands, width),
            candidates=backward | {"unfused": unfused_gradient},
            picked="tma",
        )


OPS: dict[str, Callable[[torch.device], Iterator[Work]]] = {
    "matmul": matmul_works,
    "fold": fold_works,
    "rms_norm": norm_works,
    "rotary": rotary_works,
    "glu": glu_works,
    "embedding": embedding_works,
    "token_logprobs": logprobs_works,
}
