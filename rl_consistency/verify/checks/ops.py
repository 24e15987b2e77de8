"""C1 and C3 op by op: a row alone and among others is the same bytes; parameter gradients are left
folds, whatever the cut into calls and the filler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.glu_linear import glu_linear
from rl_consistency.kernels.linear.op import linear, linear_glu, linear_qkv
from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.kernels.reduction.masked_reduction import masked_mean, masked_sum
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm
from rl_consistency.kernels.rotary.op import rotary, rotary_table
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits, token_logprobs
from rl_consistency.verify.checks.op_setup import TINY_SHAPES, OpSetup, padded
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import RowOp, cuts_alike, leaf_gradients, misaligned, rows_alike
from rl_consistency.verify.probe import probe, probe_tokens

EPS = 1e-6
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")


def check_linear(tally: Tally, setup: OpSetup) -> None:
    """y and dX of `linear`, with and without bias; projections of one x in one call."""
    for i, (inner, columns) in enumerate(setup.shapes.linear):
        weight = setup.drawn((columns, inner), i, weight_scale(inner))
        bias = setup.drawn((columns,), 10 + i) if i else None
        x = setup.drawn((setup.rows, inner), 20 + i)
        dy = setup.drawn((setup.rows, columns), 30 + i, 0.02)
        name = f"{inner} x {columns}"
        _alike(tally, setup, name, partial(linear, weight=weight, bias=bias), x)
        _alike(tally, setup, f"{name} dX", _gradients_of(partial(linear, weight=weight)), x, dy)
    _check_gated_products(tally, setup)
    with torch.no_grad():
        _check_fused_projections(tally, setup)


def _check_gated_products(tally: Tally, setup: OpSetup) -> None:
    """`glu_linear` against `glu` and `linear` apart: values, dgate, dup, dW and dbias."""
    width, columns = setup.shapes.glu_width, setup.shapes.hidden_size
    # Small, and dy too: dW sums products of three outliers over all rows, and has to fit into fp16.
    gate, up = (setup.drawn((setup.rows, width), 60 + i, 0.1) for i in range(2))
    weight, bias = (
        setup.drawn((columns, width), 62, weight_scale(width)),
        setup.drawn((columns,), 63),
    )
    dy = setup.drawn((setup.rows, columns), 64, 0.002)

    operands = (gate, up, weight, bias)
    for activation in ACTIVATIONS:

        def apart(gate: Tensor, up: Tensor, *rest: Tensor, of: str = activation) -> Tensor:
            return linear(glu(gate, up, of), *rest)

        expected, actual = (
            (op(*operands), *leaf_gradients(op, operands, dy))
            for op in (apart, partial(glu_linear, activation=activation))
        )
        for i, name in enumerate(("y", "dgate", "dup", "dW", "dbias")):
            tally.equal(f"{name} of a product gated by {activation}", expected[i], actual[i])


def _check_fused_projections(tally: Tally, setup: OpSetup) -> None:
    """`linear_qkv` and `linear_glu` against the ops they are made of, for few and many rows."""
    x, (q, k, v, gate, up) = projection_probe(setup.rows, setup)
    apart = torch.cat([linear(x, weight) for weight in (q, k, v)], dim=1)
    gated = glu(linear(x, gate), linear(x, up))
    for count in setup.sweep.row_counts():
        fused = torch.cat(linear_qkv(x[:count], (q, k, v)), dim=1)
        tally.equal(f"q, k, v in one call, {count} rows", apart[:count], fused)
        fused = linear_glu(x[:count], gate, up)
        tally.equal(f"gate, up, silu in one call, {count} rows", gated[:count], fused)


def projection_probe(rows: int, setup: OpSetup) -> tuple[Tensor, list[Tensor]]:
    """x, and the weights of its projections to q, k, v, gate and up."""
    inner, shape = setup.shapes.hidden_size, setup.shapes.attention[0]
    sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    sizes += [setup.shapes.glu_width] * 2
    scale = weight_scale(inner)
    weights = [setup.drawn((n, inner), 41 + i, scale) for i, n in enumerate(sizes)]
    # Small: the product of gate and up has to stay in the range of fp16.
    return setup.drawn((rows, inner), 40, 0.01), weights


def check_rms_norm(tally: Tally, setup: OpSetup) -> None:
    """y and dx of `rms_norm`, for hidden states and per head; with the residual addition."""
    shape = setup.shapes.attention[0]
    sizes = [(width,) for width in setup.shapes.norm_widths]
    for size in (*sizes, (shape.heads, shape.head_dim)):
        width, heads = size[-1], size[0] if len(size) == 2 else 1
        weight = setup.drawn((width,), width)
        x = setup.drawn((setup.rows, *size), width + 1)
        dy = setup.drawn((setup.rows, *size), width + 2, scale=2**-4)  # dx has to fit into fp16
        name = f"width {width}" if heads == 1 else f"{heads} heads of {width}"
        op = partial(rms_norm, weight=weight, eps=EPS, rows_per_token=heads)
        _alike(tally, setup, name, op, x)
        _alike(tally, setup, f"{name} dx", _gradients_of(op), x, dy)
        if heads == 1:
            _check_residual_addition(tally, f"{name}, with the residual addition", x, dy, weight)


def _check_residual_addition(
    tally: Tally, case: str, x: Tensor, residual: Tensor, weight: Tensor
) -> None:
    """`add_rms_norm` against the addition and the norm apart, values and gradients."""

    def apart(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return rms_norm(total, weight, EPS), total

    fused = partial(add_rms_norm, weight=weight, eps=EPS)
    expected, actual = (
        torch.cat([*op(x, residual), *leaf_gradients(op, (x, residual), residual, x)], dim=1)
        for op in (apart, fused)
    )
    tally.equal(case, expected, actual)


def check_rotary(tally: Tally, setup: OpSetup) -> None:
    """Rotated queries and keys and their gradients, and the table for any reach of positions."""
    q, k, cos, sin, inv_freq, table = rotary_probe(setup, setup.rows)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat(rotary(q, k, cos, sin), dim=1)

    def gradients(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dys = torch.cat([k, q], dim=1).split([q.shape[1], k.shape[1]], dim=1)
        return torch.cat(leaf_gradients(lambda q, k: rotary(q, k, cos, sin), (q, k), *dys), dim=1)

    _alike(tally, setup, "q and k", rotated, q, k, cos, sin)
    _alike(tally, setup, "dq and dk", gradients, q, k, cos, sin)
    for reach in setup.sweep.row_counts():
        short = rotary_table(inv_freq, reach).to(setup.device).transpose(0, 1)
        expected = table[:, :reach].transpose(0, 1)
        tally.equal(f"table of {reach}", expected, short, "position {}".format)


def rotary_probe(setup: OpSetup, rows: int) -> tuple[Tensor, ...]:
    """q, k, their cosines and sines; the frequencies, and the table [2, 2 * rows, D / 2]."""
    shape = setup.shapes.attention[0]
    inv_freq = setup.shapes.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    table = rotary_table(inv_freq, 2 * rows).to(setup.device)
    cos, sin = table[:, torch.arange(rows) * 37 % (2 * rows)]
    q = setup.drawn((rows, shape.heads, shape.head_dim), 1)
    k = setup.drawn((rows, shape.kv_heads, shape.head_dim), 2)
    return q, k, cos, sin, inv_freq, table


def check_glu(tally: Tally, setup: OpSetup) -> None:
    """Each gated activation and its gradients."""
    size = (setup.rows, setup.shapes.glu_width)
    gate = setup.drawn(size, 1, 0.5)
    # In a wide layer outliers of both meet; their product must fit fp16.
    up = setup.drawn(size, 2, 1 / 64 if setup.shapes.name else 1.0)

    for activation in ACTIVATIONS:
        op, dy = partial(glu, activation=activation), torch.ones_like(gate)
        _alike(tally, setup, activation, op, gate, up)
        _alike(tally, setup, f"{activation} gradient", _gradients_of(op), gate, up, dy)


def check_embedding(tally: Tally, setup: OpSetup) -> None:
    """Looked-up rows."""
    vocab_size = setup.shapes.vocab_size
    weight = setup.drawn((vocab_size, setup.shapes.hidden_size), 1)
    tokens = torch.tensor(probe_tokens([setup.rows], vocab_size, seed=2)[0], device=setup.device)
    _alike(tally, setup, "lookup", partial(embedding, weight=weight), tokens)


def check_token_logprobs(tally: Tally, setup: OpSetup) -> None:
    """Logprobs, entropies and dhidden, plain and truncated, whichever rows are scored."""
    hidden, weight, targets, rows = token_logprob_probe(setup.rows, setup)

    def scores(hidden: Tensor, targets: Tensor, *parameters: Tensor, chunk: int = 1024) -> Tensor:
        own = SamplingRows(**dict(zip(PARAMETERS, parameters, strict=True)))
        return torch.stack(token_logprobs(hidden, weight, targets, own, chunk_tokens=chunk), dim=1)

    def gradient(hidden: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        dy = torch.ones(len(hidden), 2, device=hidden.device)
        return leaf_gradients(lambda hidden: scores(hidden, targets, *parameters), (hidden,), dy)[0]

    # A drawn token lies inside its support; the most likely one always does.
    inside = targets_inside(hidden, weight, targets, rows)
    parameters = [getattr(rows, name) for name in PARAMETERS]
    _alike(tally, setup, "scores", scores, hidden, inside, *parameters)
    _alike(tally, setup, "dhidden", gradient, hidden, inside, *parameters)
    # Where no row truncates, logits need never exist: another schedule of the same order.
    plain = SamplingRows.uniform(len(hidden), temperature=0.9, device=setup.device)
    whole = [getattr(plain, name) for name in PARAMETERS]
    _alike(tally, setup, "scores of whole rows", scores, hidden, targets, *whole)
    _alike(tally, setup, "dhidden of whole rows", gradient, hidden, targets, *whole)
    together = scores(hidden, inside, *parameters)
    for chunk in (16, 64, 256):
        found = scores(hidden, inside, *parameters, chunk=chunk)
        tally.equal(f"chunk_tokens {chunk}", together, found)
    skipped = torch.arange(len(inside), device=setup.device) % 3 == 0
    some = inside.masked_fill(skipped, IGNORED)
    tally.equal("a third ignored", together[~skipped], scores(hidden, some, *parameters)[~skipped])


def check_masked_reduction(tally: Tally, setup: OpSetup) -> None:
    """Sum and mean of the same active values under every padding; inactive places hold NaN."""
    parts = [setup.drawn((n,), i) for i, n in enumerate(setup.sweep.sample_lengths())]
    flat = torch.cat(parts)
    expected = torch.stack([masked_sum(flat), masked_mean(flat)])
    for pad in setup.sweep.pads:
        for side in ("left", "right"):
            values, mask = padded(parts, pad, side, filler=torch.nan)
            found = torch.stack([masked_sum(values, mask), masked_mean(values, mask)])
            tally.equal(f"{side} padding {pad}", expected, found, ("sum", "mean").__getitem__)
    tally.equal("run again", expected, torch.stack([masked_sum(flat), masked_mean(flat)]))


def check_gradient_norm(tally: Tally, setup: OpSetup) -> None:
    """The norm of the same gradients stored in other ways and computed by other thread counts."""
    # Gradients are fp32 whatever the model is.
    shapes = [(n, 96) for n in setup.sweep.lengths] + [(1_048_583,)]
    drawn = partial(probe, scale=0.01, device=setup.device)
    gradients = [drawn(shape, seed=i) for i, shape in enumerate(shapes)]
    expected = gradient_norm(gradients)
    strided = [g.repeat_interleave(2, dim=0)[::2] for g in gradients]
    tally.equal("strided storage", expected, gradient_norm(strided))
    tally.equal("misaligned storage", expected, gradient_norm(map(misaligned, gradients)))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tally.equal(f"{count} threads", expected, gradient_norm(gradients))
    finally:
        torch.set_num_threads(threads)


def check_linear_fold(tally: Tally, setup: OpSetup) -> None:
    """dW and dbias of `linear`."""
    for inner, columns in setup.shapes.linear if setup.shapes.name else ((96, 208),):
        inputs = setup.drawn((setup.rows, inner), 3), setup.drawn((setup.rows, columns), 4)
        sizes = {"weight": (columns, inner), "bias": (columns,)}
        _fold_alike(tally, setup, linear, sizes, inputs, (1.0, 0.0))


def check_rms_norm_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of `rms_norm`, for hidden states and for several heads a token."""
    shape = setup.shapes.attention[0]
    for heads, width in ((1, setup.shapes.norm_widths[0]), (shape.heads, shape.head_dim)):
        op = partial(rms_norm, eps=EPS, rows_per_token=heads)
        inputs = [setup.drawn((setup.rows, heads, width), seed) for seed in (2, 3)]
        _fold_alike(tally, setup, op, {"weight": (width,)}, inputs, (1.0, 0.0))


def check_embedding_fold(tally: Tally, setup: OpSetup) -> None:
    """The gradient of an embedding whose tokens repeat."""
    vocab_size, hidden_size = setup.shapes.vocab_size, setup.shapes.hidden_size
    tokens = torch.tensor(probe_tokens([setup.rows], vocab_size, seed=2)[0], device=setup.device)
    inputs = tokens, setup.drawn((setup.rows, hidden_size), 3)
    _fold_alike(tally, setup, embedding, {"weight": (vocab_size, hidden_size)}, inputs)


def check_lm_head_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of the LM head inside `token_logprobs`, and its chunks of tokens."""
    hidden, head, targets, sampling = token_logprob_probe(setup.rows, setup)
    inside = targets_inside(hidden, head, targets, sampling)
    plain = SamplingRows.uniform(setup.rows, device=setup.device)
    weight = parameter_of(head)
    buffer = GradientBuffer(weight)
    everything = torch.arange(len(hidden), device=setup.device)

    def backward(own: Tensor, kinds: SamplingRows, index: Tensor, chunk: int = 1024) -> None:
        # Filler has index -1: the last row, not scored.
        logprobs, entropy = token_logprobs(
            hidden[index],
            weight,
            own[index].masked_fill(index < 0, IGNORED),
            kinds.select(index),
            chunk_tokens=chunk,
            weight_grad=buffer,
        )
        (logprobs.sum() - 0.1 * entropy.sum()).backward()

    for own, kinds in ((inside, sampling), (targets, plain)):
        run = partial(backward, own, kinds)
        cuts_alike(tally, (weight,), run, (everything,), (-1,))
        whole = None
        for chunk in (1024, 16, 48):
            weight.grad = None
            run(everything, chunk)
            assert weight.grad is not None
            whole = weight.grad.clone() if whole is None else whole
            tally.equal(f"chunk_tokens {chunk}", whole, weight.grad)


def weight_scale(inner: int) -> float:
    """Factor on a weight's probe that keeps products over `inner` channels within fp16."""
    return 0.02 * min(1.0, (1000 / inner) ** 0.5)


def token_logprob_probe(rows: int, setup: OpSetup) -> tuple[Tensor, Tensor, Tensor, SamplingRows]:
    """Hidden states, LM head, targets, and sampling parameters of five kinds in turn."""
    hidden_size, vocab_size = setup.shapes.hidden_size, setup.shapes.vocab_size
    # Logits spread over a few nats, as at the tiny sizes: variances add up over hidden_size.
    scale = 0.02 * (TINY_SHAPES.hidden_size / hidden_size) ** 0.5
    hidden = setup.drawn((rows, hidden_size), 1, 0.1)
    weight = setup.drawn((vocab_size, hidden_size), 2, scale)
    targets = torch.tensor(probe_tokens([rows], vocab_size, seed=3)[0], device=setup.device)
    kinds = ({}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.9})
    kinds += ({"min_p": 0.05}, {"temperature": 0.0})
    return hidden, weight, targets, sampling_in_turn(kinds, rows, setup.device)


def sampling_in_turn(
    kinds: tuple[dict[str, Any], ...], rows: int, device: torch.device
) -> SamplingRows:
    """Row i has the parameters of kind i, kinds repeated."""
    each = [SamplingRows.uniform(1, device=device, **kind) for kind in kinds]
    return SamplingRows.concatenate(each).select(torch.arange(rows, device=device) % len(kinds))


def targets_inside(hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows) -> Tensor:
    """The targets, replaced by the most likely token where truncation leaves them out."""
    logprobs, _ = token_logprobs(hidden, weight, targets, rows)
    best = lm_head_logits(hidden, weight).argmax(dim=1)
    return torch.where(logprobs.isfinite(), targets, best)


def _alike(tally: Tally, setup: OpSetup, name: str, op: RowOp, *inputs: Tensor) -> None:
    rows_alike(tally, name, op, *inputs, counts=setup.sweep.row_counts())


def parameter_of(values: Tensor) -> nn.Parameter:
    """A parameter of these values, whose gradient is fp32."""
    parameter = nn.Parameter(values)
    parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]  # all digits are compared
    return parameter


def _gradients_of(op: RowOp) -> RowOp:
    """(operands, dy) -> gradients of all operands side by side."""
    return lambda *xs: torch.cat(leaf_gradients(op, xs[:-1], xs[-1]), dim=1)


def _fold_alike(
    tally: Tally,
    setup: OpSetup,
    op: Callable[..., Tensor],
    sizes: Mapping[str, tuple[int, ...]],
    inputs: Sequence[Tensor],
    filler: Sequence[float] | None = None,
) -> None:
    """C3 of an op with parameters of some sizes; `inputs` are its operand and dy, row by row."""
    drawn = [parameter_of(setup.drawn(size, i)) for i, size in enumerate(sizes.values(), 1)]
    weights = dict(zip(sizes, drawn, strict=True))
    buffers = {f"{name}_grad": GradientBuffer(weight) for name, weight in weights.items()}
    bound = partial(op, **weights, **buffers)
    cuts_alike(tally, drawn, lambda x, dy: bound(x).backward(dy), inputs, filler)
