"""C6: the error of every canonical order against fp64 is at most that of the stock op.

Errors are means over many elements of probe data, each element measured by the size of its row
and column, so that neither one unlucky rounding nor one outlier channel decides. Parameter
gradients are those of 512 tokens: the error of a left fold in fp32 grows faster with the number of
tokens than that of a library that blocks its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_reference, attention_varlen
from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu, glu_reference
from rl_consistency.kernels.linear.op import linear, linear_reference
from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.kernels.reduction.masked_reduction import masked_mean
from rl_consistency.kernels.rms_norm.op import rms_norm, rms_norm_reference
from rl_consistency.kernels.rotary.op import rotary, rotary_reference, rotary_table
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import token_logprobs, token_logprobs_reference
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT
from rl_consistency.verify.checks.attention import SCORE_SCALE
from rl_consistency.verify.checks.op_setup import Heads, OpSetup
from rl_consistency.verify.checks.rows import token_logprob_probe, weight_scale
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.probe import probe

Op = Callable[..., Tensor]

Draw = tuple[tuple[Tensor, ...], Tensor]
"""(operands, gradient of the output)."""

ROWS = 512
"""Tokens of one draw."""

MANY = 32
"""Draws where an error is a mean over few elements (a bias, a norm's weight)."""


def check_linear_accuracy(tally: Tally, setup: OpSetup) -> None:
    """y, dX, dW and dbias."""

    def draw(inner: int, columns: int, seed: int) -> Draw:
        return (
            _drawn(setup, (ROWS, inner), seed, weight_scale(inner)),
            _drawn(setup, (columns, inner), seed + 1),
            _drawn(setup, (columns,), seed + 2),
        ), _drawn(setup, (ROWS, columns), seed + 3, 0.02)

    shapes = setup.shapes.linear
    if not setup.shapes.name:
        draws = [draw(96, 208, 10 * i) for i in range(MANY)]
        _compare(tally, "96 x 208", linear, F.linear, linear_reference, draws)
        shapes = ((1000, 331),)
    for inner, columns in shapes:
        # The bias sees no K; one draw of it would be judged by a few outlier channels.
        operands, dy = draw(inner, columns, 1)
        draws = [(operands[:2], dy)]
        _compare(tally, f"{inner} x {columns}", linear, F.linear, linear_reference, draws)


def check_rms_norm_accuracy(tally: Tally, setup: OpSetup) -> None:
    """y, dx and dweight."""

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def draw(width: int, seed: int) -> Draw:
        x, dy = (_drawn(setup, (ROWS, width), seed + i) for i in (0, 1))
        return (x, _drawn(setup, (width,), seed + 2)), dy * 0.02

    for width in setup.shapes.norm_widths if setup.shapes.name else (96, 1000):
        _compare(
            tally,
            f"width {width}",
            lambda x, weight: rms_norm(x, weight, 1e-6),
            stock,
            lambda x, weight: rms_norm_reference(x, weight, 1e-6),
            (draw(width, 10 * i) for i in range(MANY)),
        )


def check_rotary_accuracy(tally: Tally, setup: OpSetup) -> None:
    """Rotated rows and their gradient, at positions up to 4096."""
    head_dim = setup.shapes.attention[0].head_dim if setup.shapes.name else 64
    frequencies = setup.shapes.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    reach = torch.arange(ROWS) * 8
    cos, sin = rotary_table(frequencies, int(reach.max()) + 1)[:, reach].to(setup.device)
    inv_freq, positions = frequencies.to(setup.device), reach.to(setup.device)

    def stock(x: Tensor) -> Tensor:
        angles = positions[:, None].float() * inv_freq
        cos, sin = (
            torch.cat([f, f], dim=-1).to(x.dtype)[:, None] for f in (angles.cos(), angles.sin())
        )
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    x, dy = (_drawn(setup, (ROWS, 4, head_dim), s) for s in (1, 2))
    _compare(
        tally,
        "rotation",
        lambda x: rotary(x, x, cos, sin)[0],
        stock,
        lambda x: rotary_reference(x, inv_freq, positions),
        [((x,), dy)],
    )


def check_glu_accuracy(tally: Tally, setup: OpSetup) -> None:
    """Every activation, values and gradients."""
    stock = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    width = setup.shapes.glu_width if setup.shapes.name else 208

    def draw(seed: int) -> Draw:
        gate, up, dy = (_drawn(setup, (ROWS, width), seed + i) for i in range(3))
        # Three outliers multiplied together must fit fp16; a wide layer has larger ones.
        divisor = 64 if setup.shapes.name else 32
        return (gate, up / divisor), dy / divisor

    draws = [draw(10 * i) for i in range(4)]
    for activation in ACTIVATIONS:
        _compare(
            tally,
            activation,
            lambda gate, up, a=activation: glu(gate, up, a),
            lambda gate, up, a=activation: stock[a](gate) * up,
            lambda gate, up, a=activation: glu_reference(gate, up, a),
            draws,
        )


def check_embedding_accuracy(tally: Tally, setup: OpSetup) -> None:
    """The gradient where tokens repeat."""
    tokens = torch.arange(8 * ROWS, device=setup.device) * 7 % 61
    width = setup.shapes.hidden_size
    weight = _drawn(setup, (61, width), 1)
    dy = _drawn(setup, (len(tokens), width), 2, 0.02)
    _compare(
        tally,
        "lookup",
        lambda weight: embedding(tokens, weight),
        lambda weight: F.embedding(tokens, weight),
        lambda weight: F.embedding(tokens, weight.double()),
        [((weight,), dy)],
    )


def check_attention_accuracy(tally: Tally, setup: OpSetup) -> None:
    """o, dq, dk and dv of one causal sequence."""
    shape = setup.shapes.attention[0] if setup.shapes.name else Heads(4, 2, 64)
    layout = PackedSequences.of([0], [ROWS])
    queries, keys = ((ROWS, n, shape.head_dim) for n in (shape.heads, shape.kv_heads))
    operands = (
        _drawn(setup, queries, 1, SCORE_SCALE),
        _drawn(setup, keys, 2, SCORE_SCALE),
        _drawn(setup, keys, 3, 0.1),
    )

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    _compare(
        tally,
        "causal",
        lambda q, k, v: attention_varlen(q, k, v, layout, scale=shape.scale)[0],
        stock,
        lambda q, k, v: attention_reference(q, k, v, scale=shape.scale),
        [(operands, _drawn(setup, queries, 4, 0.1))],
    )


def check_token_logprobs_accuracy(tally: Tally, setup: OpSetup) -> None:
    """Logprobs, dhidden and dweight against log_softmax of the model's own logits."""
    hidden, weight, targets, _ = token_logprob_probe(ROWS, setup)
    rows = SamplingRows.uniform(len(hidden), device=setup.device)

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = F.linear(hidden, weight).float().log_softmax(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)

    dy = probe((len(hidden),), torch.float32, seed=4, device=setup.device)
    _compare(
        tally,
        "logprobs",
        lambda hidden, weight: token_logprobs(hidden, weight, targets, rows)[0],
        stock,
        lambda hidden, weight: token_logprobs_reference(hidden, weight, targets)[0],
        [((hidden, weight), dy)],
    )


def check_masked_reduction_accuracy(tally: Tally, setup: OpSetup) -> None:
    """Means of many batches of values."""
    # Losses are fp32 whatever the model is.
    batches = probe((256, 4097), torch.float32, seed=1, device=setup.device).unbind(0)
    exact = torch.stack([b.double().mean() for b in batches])
    ours = torch.stack([masked_mean(b) for b in batches])
    stock = torch.stack([b.mean() for b in batches])
    _judge(tally, "mean", *_errors(ours, stock, exact))


def check_gradient_norm_accuracy(tally: Tally, setup: OpSetup) -> None:
    """Norms of many sets of gradients."""
    # Gradients are fp32 whatever the model is.
    sets = [
        [probe((n, 96), seed=64 * i + n, device=setup.device) for n in (3, 96, 331)]
        for i in range(64)
    ]
    exact = torch.stack(
        [torch.stack([g.double().square().sum() for g in s]).sum().sqrt() for s in sets]
    )
    stock = torch.stack([torch.nn.utils.get_total_norm(s) for s in sets])
    ours = torch.stack([gradient_norm(s) for s in sets])
    _judge(tally, "norm", *_errors(ours, stock, exact))


def _drawn(setup: OpSetup, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return probe(shape, setup.dtype, seed=seed, scale=scale, device=setup.device)


def _compare(
    tally: Tally, case: str, ours: Op, stock: Op, reference: Op, draws: Iterable[Draw]
) -> None:
    """Judge an op's value and the gradient of each operand, errors averaged over the draws."""
    errors: list[list[tuple[float, float]]] = []
    for operands, dy in draws:
        found = [_value_and_gradients(op, operands, dy) for op in (ours, stock)]
        wide = tuple(x.double() for x in operands)
        exact = _value_and_gradients(reference, wide, dy.double())
        errors.append([_errors(*values) for values in zip(*found, exact, strict=True)])
    for i, pairs in enumerate(zip(*errors, strict=True)):
        mine, theirs = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        _judge(tally, case if i == 0 else f"{case}, gradient of operand {i}", mine, theirs)


def _value_and_gradients(op: Op, operands: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    value = op(*leaves)
    value.backward(dy.to(value.dtype))
    return [value.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _errors(ours: Tensor, stock: Tensor, exact: Tensor) -> tuple[float, float]:
    scale = _scale(exact)
    mine, theirs = (((x.double() - exact) / scale).abs().mean().item() for x in (ours, stock))
    return mine, theirs


def _judge(tally: Tally, case: str, mine: float, theirs: float) -> None:
    ratio = mine / theirs if theirs else (1.0 if mine == 0 else float("inf"))
    text = f"{ratio:.3f} x the stock error ({mine:.2e} against {theirs:.2e} of the value)"
    tally.expect(case, ratio <= ERROR_GROWTH_LIMIT, text)
    if tally.figure is None or ratio > tally.figure:
        tally.figure = ratio
        if not tally.mismatches:
            tally.detail = f"largest in {case}: {text}"


def _scale(exact: Tensor) -> Tensor:
    """The size of a value's row and column, so that no outlier channel decides the mean alone."""
    if exact.dim() < 2:
        return exact.square().mean().sqrt()
    rows = exact.square().flatten(1).mean(1).sqrt().view(-1, *[1] * (exact.dim() - 1))
    rows = rows.masked_fill(rows == 0, 1.0)
    columns = (exact / rows).square().mean(0, keepdim=True).sqrt()
    return rows * columns.masked_fill(columns == 0, 1.0)
