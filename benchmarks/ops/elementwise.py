"""Norms, rotary, SwiGLU and embedding: bound by memory, held against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.peers import liger
from benchmarks.shapes import HEAD_DIM
from benchmarks.suite import Case, cases, gradients, normal
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.gradient_fold.op import fold_rows
from rl_consistency.kernels.pointwise.embedding import embedding
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_table
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm

EPS = 1e-6
KV_SHARE = 4
"""Query heads per key head of the rotary case."""

Op = Callable[..., Any]
Ops = dict[str, Op | None]
"""`ours`, `eager` and peers; None where one is not installed."""


def elementwise_cases(tokens: int, width: int, vocabulary: int) -> list[Case]:
    """Every op, forward and backward, at [tokens, width]."""
    runs: dict[str, Callable[..., dict[str, Any]]] = {}
    for name, case in OPS.items():
        runs[name] = partial(_race, case, False)
        runs[f"{name} backward"] = partial(_race, case, True)
    runs["embedding"] = partial(_embedding, vocabulary)
    runs["embedding gradient"] = partial(_embedding_gradient, vocabulary)
    size = {"tokens": tokens, "width": width}
    return [case for work, run in runs.items() for case in cases(work, run, [size])]


def _race(case: Op, backward: bool, bench: Machine, tokens: int, width: int) -> dict[str, Any]:
    """Measure an op of `OPS`, or its backward; every contestant gets clones of the operands,
    because some work in place."""
    ops, operands, constants, passes = case(tokens, width, bench)
    contestants = {}
    for name, op in ops.items():
        if op is not None:
            leaves = [x.clone().requires_grad_(backward) for x in operands]
            call = partial(op, *leaves, *constants)
            call = gradients(call, leaves, _cotangent) if backward else call
            contestants[name] = Contestant.of(call)
    sizes = [x.nbytes for x in operands if x.dim() > 1]
    race = Race(
        ours=contestants.pop("ours"),
        stock={"eager": contestants.pop("eager")},
        peers=contestants,
        moved_bytes=passes[backward] * sum(sizes) / len(sizes) + sum(x.nbytes for x in constants),
    )
    return bench.measure(race)


def _cotangent(y: Tensor) -> Tensor:
    """A gradient of y, with the same values for every contestant."""
    generator = torch.Generator(y.device).manual_seed(0)
    return torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as the Hugging Face models write it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _eager_norm(total, weight), total


def _liger_norm(name: str) -> Op | None:
    norm = liger(name)
    return norm and (lambda *operands: norm(*operands, EPS, 0.0, "llama", False))


def _rms_norm(tokens: int, width: int, bench: Machine) -> Any:
    ops: Ops = {
        "ours": lambda x, weight: rms_norm(x, weight, EPS),
        "eager": _eager_norm,
        "torch rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        "liger": _liger_norm("LigerRMSNormFunction"),
    }
    return ops, [normal(bench, tokens, width), normal(bench, width)], (), (2, 3)


def _add_rms_norm(tokens: int, width: int, bench: Machine) -> Any:
    ops: Ops = {
        "ours": lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
        "eager": _eager_add_norm,
        "liger": _liger_norm("LigerFusedAddRMSNormFunction"),
    }
    operands = [normal(bench, tokens, width), normal(bench, tokens, width), normal(bench, width)]
    # Two in and two out; backward two gradients and the sum in, one gradient out for both.
    return ops, operands, (), (4, 4)


def _rotary(tokens: int, width: int, bench: Machine) -> Any:
    heads = width // HEAD_DIM
    q = normal(bench, tokens, heads, HEAD_DIM)
    k = normal(bench, tokens, max(heads // KV_SHARE, 1), HEAD_DIM)
    inv_freq = 1e6 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = rotary_table(inv_freq, tokens).to(bench.device)
    # The Hugging Face models carry both halves of the angles, in the dtype of the model.
    wide_cos, wide_sin = (torch.cat([f, f], dim=-1).to(q.dtype)[None] for f in (cos, sin))

    def heads_first(rope: Op) -> Op:
        return lambda q, k, *_: rope(*(x.transpose(0, 1)[None] for x in (q, k)), wide_cos, wide_sin)

    rope = liger("LigerRopeFunction")
    eager = heads_first(apply_rotary_pos_emb)
    ops: Ops = {"ours": rotary, "eager": eager, "liger": rope and heads_first(rope)}
    return ops, [q, k], (cos, sin), (4, 4)


def _swiglu(tokens: int, width: int, bench: Machine) -> Any:
    ops: Ops = {
        "ours": glu,
        "eager": lambda gate, up: F.silu(gate) * up,
        "liger": liger("LigerSiLUMulFunction"),
    }
    return ops, [normal(bench, tokens, width), normal(bench, tokens, width)], (), (3, 5)


OPS: dict[str, Op] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary": _rotary,
    "swiglu": _swiglu,
}
"""(tokens, width, machine) -> `Ops`; operands; further operands without gradient; how many tensors
of the operands' size the forward, and the backward, reads or writes once."""


def token_ids(tokens: int, vocabulary: int, device: torch.device) -> Tensor:
    """Ids as text has them: the r-th most frequent one about 1/r as often as the first."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(tokens, generator=generator, dtype=torch.float64)
    return (vocabulary**uniform).long().clamp(max=vocabulary - 1).to(device)


def _embedding(vocabulary: int, bench: Machine, tokens: int, width: int) -> dict[str, Any]:
    ids, weight = token_ids(tokens, vocabulary, bench.device), normal(bench, vocabulary, width)
    race = Race(
        ours=Contestant.of(lambda: embedding(ids, weight, check_ids=False)),
        stock={"eager": Contestant.of(lambda: F.embedding(ids, weight))},
        moved_bytes=2.0 * width * (tokens + ids.unique().numel()) + 8.0 * tokens,
    )
    return bench.measure(race)


def _embedding_gradient(vocabulary: int, bench: Machine, tokens: int, width: int) -> dict[str, Any]:
    """One micro-batch more, added to the gradient that is there."""
    ids, dy = token_ids(tokens, vocabulary, bench.device), normal(bench, tokens, width)
    ours, eager, indexed = (torch.zeros(vocabulary, width, device=bench.device) for _ in range(3))

    def fold() -> Tensor:
        fold_rows(ours, ids, dy)
        return ours

    def dense() -> Tensor:
        return eager.add_(torch.ops.aten.embedding_dense_backward(dy, ids, vocabulary, -1, False))

    race = Race(
        ours=Contestant.of(fold),
        stock={"eager": Contestant.of(dense)},
        peers={"index_add_": Contestant.of(lambda: indexed.index_add_(0, ids, dy.float()))},
        moved_bytes=2.0 * tokens * width + 8.0 * width * ids.unique().numel(),
    )
    return bench.measure(race)
