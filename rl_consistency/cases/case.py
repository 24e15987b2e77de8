"""What every claim about an op is tried on: operands, the op, and what it is compared with.

A `Case` is one op at one size. The laws of `verify`, its accuracy table and schedule walks, `tune`,
the benchmarks, and the tests on a CPU and on a GPU read the same cases, so a new op costs a case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.probe import probe

CPU = torch.device("cpu")

Op = Callable[..., Any]
"""Operands -> a tensor or a tuple of tensors."""

ROWS = 512
"""Rows of a draw whose error is judged."""

MANY = 32
"""Draws where an error is a mean over few elements (a bias, a norm's weight)."""

EPS = 1e-6
"""What a norm adds to the mean square."""


@dataclass(frozen=True)
class Heads:
    """One shape of attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}{window}"


@dataclass(frozen=True, kw_only=True)
class OpShapes:
    """Sizes of the operands of every op."""

    name: str
    """Name of the model that the sizes belong to; empty for the tiny ones."""
    linear: tuple[tuple[int, int], ...]
    """(in_features, out_features)."""
    norm_widths: tuple[int, ...]
    attention: tuple[Heads, ...]
    glu_width: int
    hidden_size: int
    vocab_size: int
    rope_theta: float = 10_000.0


TINY_SHAPES = OpShapes(
    name="",
    linear=((96, 208), (256, 1003), (1000, 64)),
    norm_widths=(96, 32, 1000),
    attention=(Heads(4, 2, 32), Heads(3, 3, 16), Heads(6, 1, 64, window=100)),
    glu_width=209,
    hidden_size=96,
    vocab_size=331,
)
"""MLP, a ragged LM head and a long ragged K; heads with GQA, without, and with a window."""


def shapes_of(name: str, config: Any) -> OpShapes:
    """The sizes of a model's own layers, each once."""
    hidden, inner = config.hidden_size, config.intermediate_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, dim)
    queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    layers = (hidden, queries), (hidden, keys), (queries, hidden), (hidden, inner), (inner, hidden)
    return OpShapes(
        name=name,
        linear=tuple(dict.fromkeys(layers)),
        norm_widths=(hidden, heads.head_dim),
        attention=(heads,),
        glu_width=inner,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        rope_theta=config.rope_parameters["rope_theta"],
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and at which sizes an op is tried."""

    dtype: torch.dtype
    device: torch.device = CPU
    shapes: OpShapes = TINY_SHAPES

    @property
    def real(self) -> bool:
        """Whether the sizes are a model's."""
        return bool(self.shapes.name)

    def drawn(self, shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
        """Probe values in the dtype, on the device."""
        return probe(shape, self.dtype, seed=seed, scale=scale, device=self.device)

    def wide(self, shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
        """Probe values in fp32, on the device."""
        return probe(shape, seed=seed, scale=scale, device=self.device)


Draw = Callable[[int, int], tuple[Tensor, ...]]
"""(rows, seed) -> tensors; the same arguments give the same bytes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size.

    Example: `linear` of [n, 96] has rows ("x",), shared ("weight", "bias") and gradients of all
    three; its parameters are weight and bias, for which `call` takes `weight_grad` and `bias_grad`.
    """

    op: str
    size: str
    """What the case is called among those of its op."""
    rows: tuple[str, ...]
    """Names of the operands with a row for each row of the result."""
    shared: tuple[str, ...] = ()
    """Names of the operands that all rows meet; they follow the others."""
    gradients: tuple[str, ...] = ()
    """Names of the operands that have a gradient."""
    outputs: tuple[str, ...] = ("y",)
    draw: Draw
    """Operands, in the order of `rows` and `shared`."""
    draw_dys: Draw = lambda rows, seed: ()
    """A gradient for each output of floats."""
    call: Op
    """The op itself; takes `<name>_grad`, a `GradientBuffer`, for each parameter."""
    reference: Op | None = None
    """The op in fp64, of fp64 operands."""
    stock: Op | None = None
    """What torch or transformers compute in its place."""
    seeds: tuple[int, ...] = ()
    """Seeds of the draws whose mean error is held against that of `stock`; none where another case
    stands for this."""
    count: int = ROWS
    """Rows of such a draw."""
    filler: Mapping[str, float] = field(default_factory=dict)
    """Values of filler rows, whose gradient is zero, by operand; 0 for others."""
    ways: Mapping[str, Op] = field(default_factory=dict)
    """Other ways to the same bytes, gradients too."""
    forward_ways: Mapping[str, Op] = field(default_factory=dict)
    """Other ways to the same bytes of the result alone."""
    cuts: bool = True
    """Whether a call may be cut after any 16 rows without a change of the parameters' gradients."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.rows + self.shared

    @property
    def parameters(self) -> tuple[str, ...]:
        """Operands that all rows share and that have a gradient, a fold over rows."""
        return tuple(name for name in self.shared if name in self.gradients)


def weight_scale(inner: int) -> float:
    """Factor on a weight's probe that keeps products over `inner` channels within fp16."""
    return 0.02 * min(1.0, (1000 / inner) ** 0.5)


def seeds(count: int, first: int = 0) -> tuple[int, ...]:
    """Seeds of `count` draws, far enough apart for the operands of each."""
    return tuple(10 * i + first for i in range(count))


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)
