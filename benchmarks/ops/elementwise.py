"""Norms, rotary, SwiGLU and embedding: bound by memory, held against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import liger
from benchmarks.shapes import HEAD_DIM, VOCABULARY
from benchmarks.suite import Case, normal
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.glu.op import glu
from rl_consistency.kernels.gradient_fold.op import fold_rows
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm
from rl_consistency.kernels.rotary.op import rotary, rotary_table

EPS = 1e-6
KV_SHARE = 4
"""Query heads per key head of the rotary case."""

Op = Callable[..., Any]


def elementwise_cases(
    shapes: Sequence[tuple[int, int]], vocabulary: int = VOCABULARY
) -> list[Case]:
    """Every op, forward and backward, at (tokens, width)."""
    cases = []
    for tokens, width in shapes:
        runs: dict[str, Callable[[Machine], dict[str, Any]]] = {}
        for name, run in OPS.items():
            runs[name] = partial(run, tokens, width, False)
            runs[f"{name} backward"] = partial(run, tokens, width, True)
        runs["embedding"] = partial(_embedding, tokens, width, vocabulary)
        runs["embedding gradient"] = partial(_embedding_gradient, tokens, width, vocabulary)
        shape = {"tokens": tokens, "width": width}
        cases += [Case(work=work, shape=shape, run=run) for work, run in runs.items()]
    return cases


def _race(
    bench: Machine,
    ops: dict[str, Op | None],
    operands: Sequence[Tensor],
    passes: int,
    backward: bool,
    constants: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Measure an op on operands, or its backward.

    Args:
        ops: `ours`, `eager` and peers; None where one is not installed.
        operands: every contestant gets clones, because some work in place.
        passes: how many tensors of the size of the operands are read or written once.
        constants: further operands, without gradient.
    """
    contestants = {}
    for name, op in ops.items():
        if op is not None:
            leaves = [x.clone().requires_grad_(backward) for x in operands]
            contestants[name] = Contestant.of(
                _backward(op, leaves, constants) if backward else partial(op, *leaves, *constants)
            )
    rows = [x for x in operands if x.dim() > 1]
    size = sum(x.numel() * x.element_size() for x in rows) / len(rows)
    return bench.measure(
        Race(
            ours=contestants.pop("ours"),
            stock={"eager": contestants.pop("eager")},
            peers=contestants,
            unavailable={name: "not installed" for name, op in ops.items() if op is None},
            moved_bytes=passes * size + sum(x.numel() * x.element_size() for x in constants),
        )
    )


def _backward(op: Op, leaves: list[Tensor], constants: Sequence[Tensor]) -> Callable[[], object]:
    """The gradients of the leaves from one graph, which the first call makes."""
    made: list[Any] = []

    def cotangent(y: Tensor) -> Tensor:
        # The same values for every contestant.
        generator = torch.Generator(y.device).manual_seed(0)
        return torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)

    def run() -> object:
        if not made:
            found = op(*leaves, *constants)
            outputs = found if isinstance(found, tuple) else (found,)
            made.extend((outputs, [cotangent(y) for y in outputs]))
        return torch.autograd.grad(made[0], leaves, made[1], retain_graph=True)

    return run


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As the Hugging Face models write it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _rms_norm(tokens: int, width: int, backward: bool, bench: Machine) -> dict[str, Any]:
    norm = liger("LigerRMSNormFunction")
    ops: dict[str, Op | None] = {
        "ours": lambda x, weight: rms_norm(x, weight, EPS),
        "eager": _eager_norm,
        "torch rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        "liger": norm and (lambda x, weight: norm(x, weight, EPS, 0.0, "llama", False)),
    }
    operands = [normal(bench, tokens, width), normal(bench, width)]
    return _race(bench, ops, operands, 3 if backward else 2, backward)


def _add_rms_norm(tokens: int, width: int, backward: bool, bench: Machine) -> dict[str, Any]:
    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _eager_norm(total, weight), total

    norm = liger("LigerFusedAddRMSNormFunction")
    ops: dict[str, Op | None] = {
        "ours": lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
        "eager": eager,
        "liger": norm
        and (lambda x, residual, weight: norm(x, residual, weight, EPS, 0.0, "llama", False)),
    }
    operands = [normal(bench, tokens, width), normal(bench, tokens, width), normal(bench, width)]
    # Two in and two out; backward two gradients and the sum in, one gradient out for both.
    return _race(bench, ops, operands, 4, backward)


def _rotary(tokens: int, width: int, backward: bool, bench: Machine) -> dict[str, Any]:
    heads = width // HEAD_DIM
    q = normal(bench, tokens, heads, HEAD_DIM)
    k = normal(bench, tokens, max(heads // KV_SHARE, 1), HEAD_DIM)
    inv_freq = 1e6 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = rotary_table(inv_freq, tokens).to(bench.device)
    # The Hugging Face models carry both halves of the angles, in the dtype of the model.
    wide_cos, wide_sin = (torch.cat([f, f], dim=-1).to(q.dtype)[None] for f in (cos, sin))

    def half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)

    def eager(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = wide_cos.unsqueeze(1), wide_sin.unsqueeze(1)
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    rope = liger("LigerRopeFunction")

    def liger_rope(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        assert rope is not None
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
        return rope(q, k, wide_cos, wide_sin)

    ops: dict[str, Op | None] = {"ours": rotary, "eager": eager, "liger": rope and liger_rope}
    return _race(bench, ops, [q, k], 4, backward, constants=(cos, sin))


def _swiglu(tokens: int, width: int, backward: bool, bench: Machine) -> dict[str, Any]:
    ops: dict[str, Op | None] = {
        "ours": glu,
        "eager": lambda gate, up: F.silu(gate) * up,
        "liger": liger("LigerSiLUMulFunction"),
    }
    operands = [normal(bench, tokens, width), normal(bench, tokens, width)]
    return _race(bench, ops, operands, 5 if backward else 3, backward)


OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary": _rotary,
    "swiglu": _swiglu,
}
"""(tokens, width, backward, machine) -> fields of a row."""


def _token_ids(tokens: int, vocabulary: int, bench: Machine) -> Tensor:
    """Ids as text has them: the r-th most frequent one about 1/r as often as the first."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(tokens, generator=generator, dtype=torch.float64)
    return (vocabulary**uniform).long().clamp(max=vocabulary - 1).to(bench.device)


def _embedding(tokens: int, width: int, vocabulary: int, bench: Machine) -> dict[str, Any]:
    ids, weight = _token_ids(tokens, vocabulary, bench), normal(bench, vocabulary, width)
    return bench.measure(
        Race(
            ours=Contestant.of(lambda: embedding(ids, weight, check_ids=False)),
            stock={"eager": Contestant.of(lambda: F.embedding(ids, weight))},
            moved_bytes=2.0 * width * (tokens + ids.unique().numel()) + 8.0 * tokens,
        )
    )


def _embedding_gradient(tokens: int, width: int, vocabulary: int, bench: Machine) -> dict[str, Any]:
    """One micro-batch more, added to the gradient that is there."""
    ids, dy = _token_ids(tokens, vocabulary, bench), normal(bench, tokens, width)
    ours, eager, indexed = (torch.zeros(vocabulary, width, device=bench.device) for _ in range(3))

    def fold() -> Tensor:
        fold_rows(ours, ids, dy)
        return ours

    def dense() -> Tensor:
        return eager.add_(torch.ops.aten.embedding_dense_backward(dy, ids, vocabulary, -1, False))

    def index_add() -> Tensor:
        return indexed.index_add_(0, ids, dy.float())

    return bench.measure(
        Race(
            ours=Contestant.of(fold),
            stock={"eager": Contestant.of(dense)},
            peers={"index_add_": Contestant.of(index_add)},
            moved_bytes=2.0 * tokens * width + 8.0 * width * ids.unique().numel(),
        )
    )
