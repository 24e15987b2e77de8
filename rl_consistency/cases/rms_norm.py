"""Cases of RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from rl_consistency.cases.case import EPS, MANY, Case, Setting, seeds
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm, rms_norm_reference


def rms_norm_cases(setting: Setting) -> Iterator[Case]:
    """Hidden states, with and without the residual addition, and the heads of a token."""
    widths = setting.shapes.norm_widths if setting.real else (96, 1000)
    for width in widths:
        yield rms_norm_case(setting, width, draws=MANY)
    shape = setting.shapes.attention[0]
    yield rms_norm_case(setting, shape.head_dim, shape.heads)
    for width in widths:
        yield _with_residual(setting, width)


def rms_norm_case(setting: Setting, width: int, heads: int = 1, *, draws: int = 0) -> Case:
    """Norms of [n, width], or of the heads of [n, heads, width]."""

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return weight * wide.to(x.dtype)

    def size(rows: int) -> tuple[int, ...]:
        return (rows, width) if heads == 1 else (rows, heads, width)

    return Case(
        op="rms_norm",
        size=f"{width}" if heads == 1 else f"{heads} heads of {width}",
        rows=("x",),
        shared=("weight",),
        gradients=("x", "weight"),
        draw=lambda n, seed: (setting.drawn(size(n), seed), setting.drawn((width,), seed + 2)),
        draw_dys=lambda n, seed: (setting.drawn(size(n), seed + 1) * 0.02,),
        call=partial(rms_norm, eps=EPS, rows_per_token=heads),
        stock=stock,
        reference=partial(rms_norm_reference, eps=EPS),
        seeds=seeds(draws),
        filler={"x": 1.0},
    )


def _with_residual(setting: Setting, width: int) -> Case:
    def apart(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return rms_norm(total, weight, EPS), total

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        x, residual = (setting.drawn((rows, width), seed + i) for i in range(2))
        return x, residual, setting.drawn((width,), seed + 2)

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # The sum is rounded to the dtype before it is normalised.
        total = (residual + x).to(setting.dtype).to(x.dtype)
        return rms_norm_reference(total, weight, EPS), total

    return Case(
        op="rms_norm",
        size=f"{width}, with the residual addition",
        rows=("x", "residual"),
        shared=("weight",),
        gradients=("x", "residual", "weight"),
        outputs=("y", "total"),
        draw=draw,
        draw_dys=lambda n, s: tuple(setting.drawn((n, width), s + i) * 0.02 for i in (3, 4)),
        call=partial(add_rms_norm, eps=EPS),
        reference=exact,
        filler={"x": 1.0},
        ways={"apart": apart},
    )
