"""Cases of products: `matmul`, `linear`, and what is fused with it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from rl_consistency.cases.case import MANY, ROWS, Case, Setting, seeds, weight_scale
from rl_consistency.cases.pointwise import STOCK
from rl_consistency.kernels.linear import op
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu


def matmul_cases(setting: Setting) -> Iterator[Case]:

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        both = (rows, ROWS), (ROWS, ROWS)
        return tuple(setting.drawn(s, seed + i, weight_scale(ROWS)) for i, s in enumerate(both))

    yield Case(
        op="matmul",
        size=f"{ROWS} x {ROWS}",
        rows=("x",),
        shared=("weight",),
        draw=draw,
        call=lambda x, weight: matmul_nt(x, weight, out_dtype=x.dtype),
        stock=F.linear,
        reference=F.linear,
        seeds=(1,),
    )


def linear_cases(setting: Setting) -> Iterator[Case]:
    """Layers, projections of one x in one launch, and a down projection that gates its own x."""
    if setting.real:
        # One draw of a bias, which sees no K, would be judged by a few outlier channels.
        yield linear_case(setting, *setting.shapes.linear[0], draws=0)
        for inner, columns in setting.shapes.linear:
            yield linear_case(setting, inner, columns, draws=1, bias=False)
    else:
        yield linear_case(setting, 96, 208, draws=MANY)
        yield linear_case(setting, 1000, 331, draws=1, bias=False)
    yield from _gated_products(setting)
    yield from projection_cases(setting)


def linear_case(
    setting: Setting, inner: int, columns: int, *, draws: int, bias: bool = True
) -> Case:
    names = ("x", "weight", "bias")[: 3 if bias else 2]

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        x = setting.drawn((rows, inner), seed, weight_scale(inner))
        operands = x, setting.drawn((columns, inner), seed + 1), setting.drawn((columns,), seed + 2)
        return operands[: len(names)]

    return Case(
        op="linear",
        size=f"{inner} x {columns}{', bias' if bias and not draws else ''}",
        rows=names[:1],
        shared=names[1:],
        gradients=names,
        draw=draw,
        draw_dys=lambda rows, seed: (setting.drawn((rows, columns), seed + 3, 0.02),),
        call=linear,
        stock=F.linear,
        reference=op.linear_reference,
        seeds=seeds(draws, 1),
        filler={"x": 1.0},
    )


def _gated_products(setting: Setting) -> Iterator[Case]:
    width, columns = setting.shapes.glu_width, setting.shapes.hidden_size

    # Small, and dy too: dW sums products of three outliers over all rows, and has to fit into fp16.
    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        gate, up = (setting.drawn((rows, width), seed + i, 0.1) for i in range(2))
        weight = setting.drawn((columns, width), seed + 2, weight_scale(width))
        return gate, up, weight, setting.drawn((columns,), seed + 3)

    for activation in ACTIVATIONS:

        def apart(gate: Tensor, up: Tensor, *rest: Tensor, of: str = activation) -> Tensor:
            return linear(glu(gate, up, of), *rest)

        yield Case(
            op="linear",
            size=f"product gated by {activation}",
            rows=("gate", "up"),
            shared=("weight", "bias"),
            gradients=("gate", "up", "weight", "bias"),
            draw=draw,
            draw_dys=lambda rows, seed: (setting.drawn((rows, columns), seed + 4, 0.002),),
            call=partial(op.glu_linear, activation=activation),
            reference=lambda g, up, *rest, of=STOCK[activation]: F.linear(of(g) * up, *rest),
            filler={"gate": 1.0},
            ways={"glu and linear apart": apart},
        )


def projection_cases(setting: Setting) -> Iterator[Case]:
    """Without gradients: rollout alone fuses them."""
    inner, shape = setting.shapes.hidden_size, setting.shapes.attention[0]
    columns = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]

    # Small: the product of gate and up has to stay in the range of fp16.
    def draw(rows: int, seed: int, sizes: list[int]) -> tuple[Tensor, ...]:
        scale = weight_scale(inner)
        weights = (setting.drawn((n, inner), seed + 1 + i, scale) for i, n in enumerate(sizes))
        return setting.drawn((rows, inner), seed, 0.01), *weights

    case = partial(Case, op="linear", rows=("x",))
    yield case(
        size="q, k, v in one call",
        shared=("wq", "wk", "wv"),
        outputs=("q", "k", "v"),
        draw=partial(draw, sizes=columns),
        call=lambda x, *weights: op.linear_qkv(x, weights),
        reference=lambda x, *weights: tuple(F.linear(x, w) for w in weights),
        ways={"by linear": lambda x, *weights: tuple(linear(x, w) for w in weights)},
    )
    yield case(
        size="gate, up, silu in one call",
        shared=("w_gate", "w_up"),
        draw=partial(draw, sizes=[setting.shapes.glu_width] * 2),
        call=op.linear_glu,
        reference=lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
        ways={"by linear and glu": lambda x, g, u: glu(linear(x, g), linear(x, u))},
    )
