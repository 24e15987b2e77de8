"""Cases of ops between the products: rotary positions, gated activations, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.cases.case import ROWS, Case, Setting, seeds
from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.pointwise.embedding import embedding, embedding_reference
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu, glu_reference
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_reference, rotary_table

STOCK = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""Activation -> what torch computes."""
REACH = 8
"""Distance of the positions of two rows that are rotated."""


def rotary_cases(setting: Setting) -> Iterator[Case]:
    """Few heads, whose error is judged, and a layer's own."""
    shape = setting.shapes.attention[0]
    yield rotary_case(setting, 4, 2, shape.head_dim if setting.real else 64, (0,))
    yield rotary_case(setting, shape.heads, shape.kv_heads, shape.head_dim)


def rotary_case(
    setting: Setting, queries: int, keys: int, head_dim: int, draws: tuple[int, ...] = ()
) -> Case:
    """Rotation of some heads of queries and of keys at every `REACH`-th position."""
    frequencies = setting.shapes.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    inv_freq = frequencies.to(setting.device)

    def heads(rows: int, seed: int) -> tuple[Tensor, ...]:
        sizes = enumerate((queries, keys))
        return tuple(setting.drawn((rows, n, head_dim), seed + i) for i, n in sizes)

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        reach = torch.arange(rows) * REACH
        table = rotary_table(frequencies, int(reach.max()) + 1)[:, reach].to(setting.device)
        return *heads(rows, seed), *table

    def exact(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        positions = torch.arange(len(q), device=q.device) * REACH
        return tuple(rotary_reference(x, inv_freq, positions) for x in (q, k))

    def stock(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        angles = (torch.arange(len(q), device=q.device) * REACH)[:, None].float() * inv_freq
        twice = torch.cat([angles, angles], dim=-1)[:, None]
        cos, sin = twice.cos().to(q.dtype), twice.sin().to(q.dtype)
        halves = [(x, *x.chunk(2, dim=-1)) for x in (q, k)]
        return tuple(x * cos + torch.cat([-b, a], dim=-1) * sin for x, a, b in halves)

    return Case(
        op="rotary",
        size=f"{queries} and {keys} heads of {head_dim}",
        rows=("q", "k", "cos", "sin"),
        gradients=("q", "k"),
        outputs=("q rotated", "k rotated"),
        draw=draw,
        draw_dys=lambda rows, seed: heads(rows, seed + 2),
        call=rotary,
        stock=stock,
        reference=exact,
        seeds=draws,
    )


def glu_cases(setting: Setting) -> Iterator[Case]:
    """Each gated activation; of odd widths too, whose rows begin anywhere in a vector."""
    own = setting.shapes.glu_width
    judged, *odd = [own] if setting.real else [208, own]
    # Three outliers multiplied together must fit fp16; a wide layer has larger ones.
    divisor = 64 if setting.real else 32

    def draw(rows: int, seed: int, width: int) -> tuple[Tensor, ...]:
        gate, up = (setting.drawn((rows, width), seed + i) for i in range(2))
        return gate, up / divisor

    def draw_dys(rows: int, seed: int, width: int) -> tuple[Tensor, ...]:
        return (setting.drawn((rows, width), seed + 2) / divisor,)

    for width, activation in product((judged, *odd), ACTIVATIONS):
        yield Case(
            op="glu",
            size=f"{width}, {activation}",
            rows=("gate", "up"),
            gradients=("gate", "up"),
            draw=partial(draw, width=width),
            draw_dys=partial(draw_dys, width=width),
            call=partial(glu, activation=activation),
            stock=lambda gate, up, of=STOCK[activation]: of(gate) * up,
            reference=partial(glu_reference, activation=activation),
            seeds=() if width in odd else seeds(4),
        )


def embedding_cases(setting: Setting) -> Iterator[Case]:
    """Lookups of few ids, each many times, and of ids all over the table."""
    width = setting.shapes.hidden_size

    def often(rows: int, seed: int) -> tuple[Tensor, ...]:
        tokens = torch.arange(rows, device=setting.device) * 7 % 61
        return tokens, setting.drawn((61, width), seed)

    def anywhere(rows: int, seed: int) -> tuple[Tensor, ...]:
        height = setting.shapes.vocab_size
        tokens = torch.tensor(probe_tokens([rows], height, seed=seed)[0], device=setting.device)
        return tokens, setting.drawn((height, width), seed)

    for size, draw, draws in ((f"{width}", often, (1,)), ("whole table", anywhere, ())):
        yield Case(
            op="embedding",
            size=size,
            rows=("tokens",),
            shared=("weight",),
            gradients=("weight",),
            draw=draw,
            draw_dys=lambda rows, seed: (setting.drawn((rows, width), seed + 1, 0.02),),
            call=embedding,
            stock=F.embedding,
            reference=embedding_reference,
            seeds=draws,
            count=8 * ROWS,
        )
