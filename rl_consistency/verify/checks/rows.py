"""C1 for ops that treat rows one by one: a row alone and among others is the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu
from rl_consistency.kernels.linear.op import linear, linear_glu, linear_qkv
from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.kernels.reduction.masked_reduction import masked_mean, masked_sum
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm
from rl_consistency.kernels.rotary.op import rotary, rotary_table
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits, token_logprobs
from rl_consistency.verify.checks.op_setup import TINY_SHAPES, OpSetup
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.probe import probe, probe_tokens

RowOp = Callable[..., Tensor]
"""Maps tensors of n rows to a tensor of n rows."""

HEAD_SCALE = 0.02
"""Factor on the LM head's probe that spreads the logits over a few nats."""


def check_linear(tally: Tally, setup: OpSetup) -> None:
    """y and dX of `linear`, with and without bias; projections of one x in one call."""
    dtype, device = setup.dtype, setup.device
    for i, (inner, columns) in enumerate(setup.shapes.linear):
        scale = weight_scale(inner)
        weight = probe((columns, inner), dtype, seed=i, scale=scale, device=device)
        bias = probe((columns,), dtype, seed=10 + i, device=device) if i else None
        x = probe((setup.rows, inner), dtype, seed=20 + i, device=device)
        dy = probe((setup.rows, columns), dtype, seed=30 + i, scale=0.02, device=device)
        name = f"{inner} x {columns}"
        rows_alike(tally, name, setup, lambda x, w=weight, b=bias: linear(x, w, b), x)
        rows_alike(
            tally,
            f"{name} dX",
            setup,
            lambda x, dy, w=weight: _input_gradient(lambda x: linear(x, w), x, dy),
            x,
            dy,
        )
    _check_fused_projections(tally, setup)


@torch.no_grad()
def _check_fused_projections(tally: Tally, setup: OpSetup) -> None:
    """`linear_qkv` and `linear_glu` against the ops they are made of, for few and many rows."""
    inner, shape = setup.shapes.hidden_size, setup.shapes.attention[0]
    sizes = [shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2]
    sizes += [setup.shapes.glu_width] * 2
    scale = weight_scale(inner)
    # Small: the product of gate and up has to stay in the range of fp16.
    x = probe((setup.rows, inner), setup.dtype, seed=40, scale=0.01, device=setup.device)
    q, k, v, gate, up = (
        probe((n, inner), setup.dtype, seed=41 + i, scale=scale, device=setup.device)
        for i, n in enumerate(sizes)
    )
    apart = torch.cat([linear(x, weight) for weight in (q, k, v)], dim=1)
    gated = glu(linear(x, gate), linear(x, up))
    for count in setup.sweep.row_counts():
        fused = torch.cat(linear_qkv(x[:count], (q, k, v)), dim=1)
        tally.equal(f"q, k, v in one call, {count} rows", apart[:count], fused)
        fused = linear_glu(x[:count], gate, up)
        tally.equal(f"gate, up, silu in one call, {count} rows", gated[:count], fused)


def check_rms_norm(tally: Tally, setup: OpSetup) -> None:
    """y and dx of `rms_norm`, for hidden states and per head; with the residual addition."""
    dtype, device = setup.dtype, setup.device
    for width in setup.shapes.norm_widths:
        weight = probe((width,), dtype, seed=width, device=device)
        x = probe((setup.rows, width), dtype, seed=width + 1, device=device)
        dy = probe(x.shape, dtype, seed=width + 2, device=device)
        rows_alike(tally, f"width {width}", setup, lambda x, w=weight: rms_norm(x, w, 1e-6), x)
        rows_alike(
            tally,
            f"width {width} dx",
            setup,
            lambda x, dy, w=weight: _input_gradient(lambda x: rms_norm(x, w, 1e-6), x, dy),
            x,
            dy,
        )

        def after_addition(
            x: Tensor, dy: Tensor, *, fused: bool, weight: Tensor = weight
        ) -> Tensor:
            residual, x = (t.detach().clone().requires_grad_() for t in (dy, x))
            if fused:
                y, total = add_rms_norm(x, residual, weight, 1e-6)
            else:
                total = residual + x
                y = rms_norm(total, weight, 1e-6)
            torch.autograd.backward([y, total], [dy, x.detach()])
            assert x.grad is not None and residual.grad is not None
            return torch.cat([y.detach(), total.detach(), x.grad, residual.grad], dim=1)

        case = f"width {width}, with the residual addition"
        tally.equal(case, after_addition(x, dy, fused=False), after_addition(x, dy, fused=True))
    _check_head_norm(tally, setup)


def _check_head_norm(tally: Tally, setup: OpSetup) -> None:
    shape = setup.shapes.attention[0]
    weight = probe((shape.head_dim,), setup.dtype, seed=1, device=setup.device)
    size = (setup.rows, shape.heads, shape.head_dim)
    inputs = (probe(size, setup.dtype, seed=s, device=setup.device) for s in (2, 3))

    def normed(x: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6, rows_per_token=shape.heads)

    name = f"{shape.heads} heads of {shape.head_dim} dx"
    rows_alike(tally, name, setup, lambda x, dy: _input_gradient(normed, x, dy), *inputs)


def check_rotary(tally: Tally, setup: OpSetup) -> None:
    """Rotated queries and keys and their gradients, and the table for any reach of positions."""
    shape, rows, device = setup.shapes.attention[0], setup.rows, setup.device
    head_dim = shape.head_dim
    inv_freq = setup.shapes.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    table = rotary_table(inv_freq, 2 * rows).to(device)
    cos, sin = table[:, torch.arange(rows) * 37 % (2 * rows)]
    q = probe((rows, shape.heads, head_dim), setup.dtype, seed=1, device=device)
    k = probe((rows, shape.kv_heads, head_dim), setup.dtype, seed=2, device=device)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat(rotary(q, k, cos, sin), dim=1)

    def gradients(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (x.detach().clone().requires_grad_() for x in (q, k))
        rotated(q, k, cos, sin).backward(torch.cat([k, q], dim=1).detach())
        assert q.grad is not None and k.grad is not None
        return torch.cat([q.grad, k.grad], dim=1)

    rows_alike(tally, "q and k", setup, rotated, q, k, cos, sin)
    rows_alike(tally, "dq and dk", setup, gradients, q, k, cos, sin)
    for reach in setup.sweep.row_counts():
        short = rotary_table(inv_freq, reach).to(device).transpose(0, 1)
        tally.equal(
            f"table of {reach}", table[:, :reach].transpose(0, 1), short, "position {}".format
        )


def check_glu(tally: Tally, setup: OpSetup) -> None:
    """Each gated activation and its gradients."""
    size = (setup.rows, setup.shapes.glu_width)
    gate = probe(size, setup.dtype, seed=1, scale=0.5, device=setup.device)
    # In a wide layer outliers of both meet; their product must fit fp16.
    scale = 1 / 64 if setup.shapes.name else 1.0
    up = probe(size, setup.dtype, seed=2, scale=scale, device=setup.device)
    for activation in ACTIVATIONS:

        def gradients(gate: Tensor, up: Tensor, activation: str = activation) -> Tensor:
            gate, up = (x.detach().clone().requires_grad_() for x in (gate, up))
            glu(gate, up, activation).backward(torch.ones_like(gate))
            assert gate.grad is not None and up.grad is not None
            return torch.cat([gate.grad, up.grad], dim=1)

        op = lambda gate, up, a=activation: glu(gate, up, a)  # noqa: E731
        rows_alike(tally, activation, setup, op, gate, up)
        rows_alike(tally, f"{activation} gradient", setup, gradients, gate, up)


def check_embedding(tally: Tally, setup: OpSetup) -> None:
    """Looked-up rows."""
    vocab_size, hidden_size = setup.shapes.vocab_size, setup.shapes.hidden_size
    weight = probe((vocab_size, hidden_size), setup.dtype, seed=1, device=setup.device)
    tokens = torch.tensor(probe_tokens([setup.rows], vocab_size, seed=2)[0], device=setup.device)
    rows_alike(tally, "lookup", setup, lambda tokens: embedding(tokens, weight), tokens)


def check_token_logprobs(tally: Tally, setup: OpSetup) -> None:
    """Logprobs, entropies and dhidden, plain and truncated, whichever rows are scored."""
    hidden, weight, targets, rows = token_logprob_probe(setup.rows, setup)
    parameters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)

    def scores(hidden: Tensor, targets: Tensor, *parameters: Tensor, chunk: int = 1024) -> Tensor:
        own = _sampling_rows(parameters)
        return torch.stack(token_logprobs(hidden, weight, targets, own, chunk_tokens=chunk), dim=1)

    def gradient(hidden: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        hidden = hidden.detach().clone().requires_grad_()
        scores(hidden, targets, *parameters).sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    # A drawn token lies inside its support; the most likely one always does.
    inside = targets_inside(hidden, weight, targets, rows)
    rows_alike(tally, "scores", setup, scores, hidden, inside, *parameters)
    rows_alike(tally, "dhidden", setup, gradient, hidden, inside, *parameters)
    # Where no row truncates, logits need never exist: another schedule of the same order.
    plain = SamplingRows.uniform(len(hidden), temperature=0.9, device=setup.device)
    whole = (plain.temperature, plain.top_k, plain.top_p, plain.min_p)
    rows_alike(tally, "scores of whole rows", setup, scores, hidden, targets, *whole)
    rows_alike(tally, "dhidden of whole rows", setup, gradient, hidden, targets, *whole)
    together = scores(hidden, inside, *parameters)
    for chunk in (16, 64, 256):
        tally.equal(
            f"chunk_tokens {chunk}", together, scores(hidden, inside, *parameters, chunk=chunk)
        )
    skipped = torch.arange(len(inside), device=setup.device) % 3 == 0
    some = inside.masked_fill(skipped, IGNORED)
    tally.equal("a third ignored", together[~skipped], scores(hidden, some, *parameters)[~skipped])


def check_masked_reduction(tally: Tally, setup: OpSetup) -> None:
    """Sum and mean of the same active values under every padding; inactive places hold NaN."""
    parts = [
        probe((n,), torch.float32, seed=i, device=setup.device).to(setup.dtype)
        for i, n in enumerate(setup.sweep.sample_lengths())
    ]
    flat = torch.cat(parts)
    width = max(map(len, parts))
    expected = torch.stack([masked_sum(flat), masked_mean(flat)])
    for pad in setup.sweep.pads:
        for side in ("left", "right"):
            values = flat.new_full((len(parts), width + pad), float("nan"))
            mask = torch.zeros(values.shape, dtype=torch.bool, device=setup.device)
            for row, part in enumerate(parts):
                start = width + pad - len(part) if side == "left" else 0
                values[row, start : start + len(part)] = part
                mask[row, start : start + len(part)] = True
            found = torch.stack([masked_sum(values, mask), masked_mean(values, mask)])
            tally.equal(f"{side} padding {pad}", expected, found, ("sum", "mean").__getitem__)
    tally.equal("run again", expected, torch.stack([masked_sum(flat), masked_mean(flat)]))


def check_gradient_norm(tally: Tally, setup: OpSetup) -> None:
    """The norm of the same gradients stored in other ways and computed by other thread counts."""
    # Gradients are fp32 whatever the model is.
    shapes = [(n, 96) for n in setup.sweep.lengths] + [(1_048_583,)]
    gradients = [
        probe(shape, seed=i, scale=0.01, device=setup.device) for i, shape in enumerate(shapes)
    ]
    expected = gradient_norm(gradients)
    strided = [g.repeat_interleave(2, dim=0)[::2] for g in gradients]
    shifted = [_misaligned(g) for g in gradients]
    tally.equal("strided storage", expected, gradient_norm(strided))
    tally.equal("misaligned storage", expected, gradient_norm(shifted))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tally.equal(f"{count} threads", expected, gradient_norm(gradients))
    finally:
        torch.set_num_threads(threads)


def weight_scale(inner: int) -> float:
    """Factor on a weight's probe that keeps products over `inner` outlier channels within fp16."""
    return 0.02 * min(1.0, (1000 / inner) ** 0.5)


def rows_alike(tally: Tally, name: str, setup: OpSetup, op: RowOp, *inputs: Tensor) -> None:
    """Compare rows computed alone with the same rows in calls of many sizes, orders and storages.

    Args:
        tally: counts the comparisons.
        name: of the variant, for the report.
        setup: its sweep gives the sizes of calls.
        op: maps tensors of n rows to a tensor of n rows.
        inputs: tensors [rows, ...]; row i of all of them belongs together.
    """
    rows = len(inputs[0])
    alone = torch.cat([op(*(x[i : i + 1] for x in inputs)) for i in range(rows)]).detach()
    for count in setup.sweep.row_counts():
        part = op(*(x[:count] for x in inputs)).detach()
        tally.equal(f"{name}, {count} rows", alone[:count], part)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    order = order.to(setup.device)
    tally.equal(f"{name}, permuted", alone[order], op(*(x[order] for x in inputs)).detach())
    few = min(rows, 17)
    for shift in range(few):
        turned = op(*(x[:few].roll(shift, 0) for x in inputs)).detach()
        tally.equal(f"{name}, row 0 at place {shift}", alone[:few].roll(shift, 0), turned)
    strided = op(*(x.repeat_interleave(2, dim=0)[::2] for x in inputs)).detach()
    tally.equal(f"{name}, strided storage", alone, strided)
    tally.equal(f"{name}, misaligned storage", alone, op(*map(_misaligned, inputs)).detach())


def token_logprob_probe(rows: int, setup: OpSetup) -> tuple[Tensor, Tensor, Tensor, SamplingRows]:
    """Hidden states, LM head, targets, and sampling parameters of five kinds in turn."""
    dtype, device = setup.dtype, setup.device
    hidden_size, vocab_size = setup.shapes.hidden_size, setup.shapes.vocab_size
    # Logits keep the spread they have at the tiny sizes: variances add up over hidden_size.
    scale = HEAD_SCALE * (TINY_SHAPES.hidden_size / hidden_size) ** 0.5
    hidden = probe((rows, hidden_size), dtype, seed=1, scale=0.1, device=device)
    weight = probe((vocab_size, hidden_size), dtype, seed=2, scale=scale, device=device)
    targets = torch.tensor(probe_tokens([rows], vocab_size, seed=3)[0], device=device)
    kinds = (
        SamplingRows.uniform(1, device=device),
        SamplingRows.uniform(1, temperature=0.7, top_k=20, device=device),
        SamplingRows.uniform(1, temperature=1.3, top_p=0.9, device=device),
        SamplingRows.uniform(1, min_p=0.05, device=device),
        SamplingRows.uniform(1, temperature=0.0, device=device),
    )
    turns = torch.arange(rows, device=device) % len(kinds)
    return hidden, weight, targets, SamplingRows.concatenate(list(kinds)).select(turns)


def targets_inside(hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows) -> Tensor:
    """The targets, replaced by the most likely token where truncation leaves them out."""
    logprobs, _ = token_logprobs(hidden, weight, targets, rows)
    best = lm_head_logits(hidden, weight).argmax(dim=1)
    return torch.where(logprobs.isfinite(), targets, best)


def _sampling_rows(parameters: tuple[Tensor, ...]) -> SamplingRows:
    temperature, top_k, top_p, min_p = parameters
    return SamplingRows(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _input_gradient(op: RowOp, x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    op(x).backward(dy)
    assert x.grad is not None
    return x.grad


def _misaligned(x: Tensor) -> Tensor:
    """The same values in storage that starts one element past a boundary."""
    storage = x.new_empty(x.numel() + 1)
    storage[1:] = x.detach().flatten()
    return storage[1:].view(x.shape)
