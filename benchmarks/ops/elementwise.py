"""Norms, rotary, SwiGLU and embedding: bound by memory, held against the copy bandwidth.

Operands, gradients and calls are those of `rl_consistency.cases`, at the sizes of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.models import model_config
from benchmarks.peers import liger
from benchmarks.timing import Contestant, Machine
from rl_consistency.cases.case import EPS, Setting, as_tuple, shapes_of
from rl_consistency.cases.table import CASES

Op = Callable[..., Any]

WORKS = {
    "rms_norm": ("rms_norm", 0, (2, 3)),
    # Two in and two out; backward two gradients and the sum in, one gradient out for both.
    "add_rms_norm": ("rms_norm", -2, (2, 2)),
    "rotary": ("rotary", -1, (2, 2)),
    "swiglu": ("glu", 0, (3, 5)),
    "embedding": ("embedding", -1, (2, 1)),
}
"""The op, the place of its case, and how many tensors of the results' size the forward, and the
backward, reads or writes once."""


def gradients(forward: Op, leaves: Sequence[Tensor], dys: Sequence[Tensor]) -> Op:
    """The gradients of the leaves, from one graph that the first call makes."""
    made: list[tuple[Tensor, ...]] = []

    def run() -> object:
        if not made:
            made.append(as_tuple(forward()))
        return torch.autograd.grad(made[0], leaves, dys, retain_graph=True)

    return run


def elementwise(
    name: str, backward: bool, bench: Machine, model: str, tokens: int
) -> dict[str, Any]:
    """Measure an op of `WORKS`, or its backward; every contestant gets clones of the operands,
    because some work in place."""
    op, place, passes = WORKS[name]
    shapes = shapes_of(model, model_config(model))
    setting = Setting(dtype=torch.bfloat16, device=bench.device, shapes=shapes)
    case = list(CASES[op](setting))[place]
    operands = dict(zip(case.names, case.draw(tokens, 0), strict=True))
    dys = case.draw_dys(tokens, 0)

    def contestant(way: Op) -> Contestant:
        leaves = {n: x.clone() for n, x in operands.items()}
        called = partial(way, *leaves.values())
        wanted = [leaves[n].requires_grad_(backward) for n in case.gradients]
        return Contestant([gradients(called, wanted, dys) if backward else called])

    # The check of ids would wait for the device, and no other way has it.
    ours = partial(case.call, check_ids=False) if op == "embedding" else case.call
    stock, peers = _others(name, case.stock)
    written = case.parameters if backward else ()
    read = [n for n in case.names if n not in case.gradients]
    return bench.measure(
        ours=contestant(ours),
        stock={"eager": contestant(stock)},
        peers={peer: contestant(way) for peer, way in peers.items() if way is not None},
        moved_bytes=passes[backward] * sum(dy.nbytes for dy in dys)
        + sum(operands[n].nbytes for n in (*read, *written)),
    )


def _others(name: str, stock: Any) -> tuple[Op, dict[str, Op | None]]:
    """What models run, which is the stock of a case or is written here; and the peers."""
    if name == "rms_norm":
        fused = {"torch rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)}
        return stock, {**fused, "liger": _liger_norm("LigerRMSNormFunction")}
    if name == "add_rms_norm":
        return _eager_add_norm, {"liger": _liger_norm("LigerFusedAddRMSNormFunction")}
    if name == "rotary":
        rope = liger("LigerRopeFunction")
        return _heads_first(apply_rotary_pos_emb), {"liger": rope and _heads_first(rope)}
    return stock, {"liger": liger("LigerSiLUMulFunction")} if name == "swiglu" else {}


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
