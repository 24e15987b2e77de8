"""Where and at which sizes one op is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rl_consistency.verify.probe import probe
from rl_consistency.verify.sweep import QUICK, Sweep

CPU = torch.device("cpu")

MAX_ROWS = 200
"""Rows of an op whose schedules are compared: ragged for every tile."""


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
    linear = [(hidden, queries), (hidden, keys), (queries, hidden), (hidden, inner)]
    linear.append((inner, hidden))
    return OpShapes(
        name=name,
        linear=tuple(dict.fromkeys(linear)),
        norm_widths=(hidden, heads.head_dim),
        attention=(heads,),
        glu_width=inner,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        rope_theta=config.rope_parameters["rope_theta"],
    )


@dataclass(frozen=True, kw_only=True)
class OpSetup:
    """One run over the ops: dtype, device, sizes, and how many arrangements."""

    dtype: torch.dtype
    device: torch.device = CPU
    sweep: Sweep = QUICK
    shapes: OpShapes = TINY_SHAPES

    @property
    def rows(self) -> int:
        """Rows of the largest call to an op that treats rows one by one."""
        return max(self.sweep.lengths)

    def drawn(self, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
        """Probe values in the dtype, on the device."""
        return probe(shape, self.dtype, seed=seed, scale=scale, device=self.device)


def padded(
    parts: Sequence[Tensor], pad: int, side: str, filler: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Tensors [n] as rows of one batch [parts, longest + pad], padded on the `left` or `right`, and
    the bool mask of what is theirs."""

    def batch(rows: list[Tensor], value: float) -> Tensor:
        together = pad_sequence(rows, True, value, padding_side=side)
        return F.pad(together, (pad, 0) if side == "left" else (0, pad), value=value)

    own = [torch.ones_like(part, dtype=torch.bool) for part in parts]
    return batch([*parts], filler), batch(own, False)
