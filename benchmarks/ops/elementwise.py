"""Norms, rotary, SwiGLU and embedding: bound by memory, held against the copy bandwidth.

Operands, gradients and calls are those of `rl_consistency.cases`, at the sizes of a layer.
"""

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
from rl_consistency.cases.case import EPS, Heads, OpShapes, Setting
from rl_consistency.cases.table import CASES
from rl_consistency.kernels.gradient_fold.op import fold_rows
from rl_consistency.kernels.pointwise.embedding import embedding

KV_SHARE = 4
"""Query heads per key head of the rotary case."""

Op = Callable[..., Any]

WORKS = {
    "rms_norm": ("rms_norm", 0, (2, 3)),
    # Two in and two out; backward two gradients and the sum in, one gradient out for both.
    "add_rms_norm": ("rms_norm", -1, (4, 4)),
    "rotary": ("rotary", -1, (4, 4)),
    "swiglu": ("glu", 0, (3, 5)),
}
"""The op, the place of its case, and how many tensors of the operands' size the forward, and the
backward, reads or writes once."""


def elementwise_cases(tokens: int, width: int, vocabulary: int) -> list[Case]:
    """Every op, forward and backward, at [tokens, width]."""
    runs: dict[str, Callable[..., dict[str, Any]]] = {}
    for name in WORKS:
        runs[name] = partial(_race, name, False)
        runs[f"{name} backward"] = partial(_race, name, True)
    runs["embedding"] = partial(_embedding, vocabulary)
    runs["embedding gradient"] = partial(_embedding_gradient, vocabulary)
    size = {"tokens": tokens, "width": width}
    return [case for work, run in runs.items() for case in cases(work, run, [size])]


def _race(name: str, backward: bool, bench: Machine, tokens: int, width: int) -> dict[str, Any]:
    """Measure an op of `WORKS`, or its backward; every contestant gets clones of the operands,
    because some work in place."""
    op, place, passes = WORKS[name]
    heads = max(width // HEAD_DIM, 1)
    shapes = OpShapes(
        name="bench",
        linear=(),
        norm_widths=(width,),
        attention=(Heads(heads, max(heads // KV_SHARE, 1), HEAD_DIM),),
        glu_width=width,
        hidden_size=width,
        vocab_size=0,
        rope_theta=1e6,
    )
    case = list(CASES[op](Setting(dtype=torch.bfloat16, device=bench.device, shapes=shapes)))[place]
    operands = dict(zip(case.names, case.draw(tokens, 0), strict=True))
    dys = case.draw_dys(tokens, 0)

    def contestant(op: Op) -> Contestant:
        leaves = {n: x.clone() for n, x in operands.items()}
        called = partial(op, *leaves.values())
        wanted = [leaves[n].requires_grad_(backward) for n in case.gradients]
        return Contestant.of(gradients(called, wanted, dys) if backward else called)

    others = _others(name, case.stock)
    sizes = [operands[n].nbytes for n in case.gradients if operands[n].dim() > 1]
    constants = sum(x.nbytes for n, x in operands.items() if n not in case.gradients)
    race = Race(
        ours=contestant(case.call),
        stock={"eager": contestant(others.pop("eager"))},
        peers={name: contestant(other) for name, other in others.items()},
        moved_bytes=passes[backward] * sum(sizes) / len(sizes) + constants,
    )
    return bench.measure(race)


def _others(name: str, stock: Any) -> dict[str, Op]:
    """`eager`, the stock of the case where it is what models run, and the peers that are here."""
    found: dict[str, Op | None] = {"eager": stock}
    if name == "rms_norm":
        found["torch rms_norm"] = lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)
        found["liger"] = _liger_norm("LigerRMSNormFunction")
    elif name == "add_rms_norm":
        found = {"eager": _eager_add_norm, "liger": _liger_norm("LigerFusedAddRMSNormFunction")}
    elif name == "rotary":
        rope = liger("LigerRopeFunction")
        found["eager"] = _heads_first(apply_rotary_pos_emb)
        found["liger"] = rope and _heads_first(rope)
    else:
        found["liger"] = liger("LigerSiLUMulFunction")
    return {way: op for way, op in found.items() if op is not None}


def _eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and its RMSNorm as the Hugging Face models write it."""
    total = x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype), total


def _liger_norm(name: str) -> Op | None:
    norm = liger(name)
    return norm and (lambda *operands: norm(*operands, EPS, 0.0, "llama", False))


def _heads_first(rope: Op) -> Op:
    """A rotation of [1, heads, tokens, head_dim] by both halves of the angles in the dtype of the
    model, made once for all layers: the Hugging Face models carry them so."""
    made: list[Tensor] = []

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if not made:
            made.extend(torch.cat([f, f], dim=-1).to(q.dtype)[None] for f in (cos, sin))
        found = rope(*(x.transpose(0, 1)[None] for x in (q, k)), *made)
        return tuple(y[0].transpose(0, 1) for y in found)

    return call


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
