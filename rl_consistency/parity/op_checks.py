"""C1 for ops that treat rows one by one: a row alone and among others is the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_consistency.kernels.embedding import embedding
from rl_consistency.kernels.glu import ACTIVATIONS, glu
from rl_consistency.kernels.gradient_norm import gradient_norm
from rl_consistency.kernels.linear import linear
from rl_consistency.kernels.masked_reduction import masked_mean, masked_sum
from rl_consistency.kernels.rms_norm import rms_norm
from rl_consistency.kernels.rotary import rotary, rotary_table
from rl_consistency.kernels.sampling_support import SamplingRows
from rl_consistency.kernels.token_logprobs import IGNORED, token_logprobs
from rl_consistency.parity.claims import Tally
from rl_consistency.parity.probe import probe, probe_tokens
from rl_consistency.parity.sweep import Sweep

RowOp = Callable[..., Tensor]
"""Maps tensors of n rows to a tensor of n rows."""

LINEAR_SHAPES = ((96, 208), (256, 1003), (1000, 64))
"""(K, N): MLP, a ragged LM head, a long ragged K."""

HEAD_SCALE = 0.02
"""Factor on the LM head's probe that spreads the logits over a few nats."""


def check_linear(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """y and dX of `linear`, with and without bias."""
    for i, (inner, columns) in enumerate(LINEAR_SHAPES):
        weight = probe((columns, inner), dtype, seed=i, scale=0.02)
        bias = probe((columns,), dtype, seed=10 + i) if i else None
        x = probe((max(sweep.lengths), inner), dtype, seed=20 + i)
        dy = probe((len(x), columns), dtype, seed=30 + i, scale=0.02)
        name = f"{inner} x {columns}"
        rows_alike(tally, name, sweep, lambda x, w=weight, b=bias: linear(x, w, b), x)
        rows_alike(
            tally,
            f"{name} dX",
            sweep,
            lambda x, dy, w=weight: _input_gradient(lambda x: linear(x, w), x, dy),
            x,
            dy,
        )


def check_rms_norm(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """y and dx of `rms_norm`, for hidden states and per head."""
    for width in (96, 32, 1000):
        weight = probe((width,), dtype, seed=width)
        x = probe((max(sweep.lengths), width), dtype, seed=width + 1)
        dy = probe(x.shape, dtype, seed=width + 2)
        rows_alike(tally, f"width {width}", sweep, lambda x, w=weight: rms_norm(x, w, 1e-6), x)
        rows_alike(
            tally,
            f"width {width} dx",
            sweep,
            lambda x, dy, w=weight: _input_gradient(lambda x: rms_norm(x, w, 1e-6), x, dy),
            x,
            dy,
        )


def check_rotary(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """Rotated queries and keys and their gradients, and the table for any reach of positions."""
    head_dim, rows = 32, max(sweep.lengths)
    inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    table = rotary_table(inv_freq, 2 * rows)
    cos, sin = table[:, torch.arange(rows) * 37 % (2 * rows)]
    q = probe((rows, 4, head_dim), dtype, seed=1)
    k = probe((rows, 2, head_dim), dtype, seed=2)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat(rotary(q, k, cos, sin), dim=1)

    def gradients(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (x.detach().clone().requires_grad_() for x in (q, k))
        rotated(q, k, cos, sin).backward(torch.cat([k, q], dim=1).detach())
        assert q.grad is not None and k.grad is not None
        return torch.cat([q.grad, k.grad], dim=1)

    rows_alike(tally, "q and k", sweep, rotated, q, k, cos, sin)
    rows_alike(tally, "dq and dk", sweep, gradients, q, k, cos, sin)
    for reach in sweep.row_counts():
        short = rotary_table(inv_freq, reach).transpose(0, 1)
        tally.equal(
            f"table of {reach}", table[:, :reach].transpose(0, 1), short, "position {}".format
        )


def check_glu(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """Each gated activation and its gradients."""
    gate = probe((max(sweep.lengths), 209), dtype, seed=1, scale=0.5)
    up = probe(gate.shape, dtype, seed=2)
    for activation in ACTIVATIONS:

        def gradients(gate: Tensor, up: Tensor, activation: str = activation) -> Tensor:
            gate, up = (x.detach().clone().requires_grad_() for x in (gate, up))
            glu(gate, up, activation).backward(torch.ones_like(gate))
            assert gate.grad is not None and up.grad is not None
            return torch.cat([gate.grad, up.grad], dim=1)

        op = lambda gate, up, a=activation: glu(gate, up, a)  # noqa: E731
        rows_alike(tally, activation, sweep, op, gate, up)
        rows_alike(tally, f"{activation} gradient", sweep, gradients, gate, up)


def check_embedding(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """Looked-up rows."""
    weight = probe((331, 96), dtype, seed=1)
    tokens = torch.tensor(probe_tokens([max(sweep.lengths)], 331, seed=2)[0])
    rows_alike(tally, "lookup", sweep, lambda tokens: embedding(tokens, weight), tokens)


def check_token_logprobs(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """Logprobs, entropies and dhidden, plain and truncated, whichever rows are scored."""
    hidden, weight, targets, rows = token_logprob_probe(max(sweep.lengths), dtype)
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
    rows_alike(tally, "scores", sweep, scores, hidden, inside, *parameters)
    rows_alike(tally, "dhidden", sweep, gradient, hidden, inside, *parameters)
    together = scores(hidden, inside, *parameters)
    for chunk in (16, 64, 256):
        tally.equal(
            f"chunk_tokens {chunk}", together, scores(hidden, inside, *parameters, chunk=chunk)
        )
    some = inside.masked_fill(torch.arange(len(inside)) % 3 == 0, IGNORED)
    kept = some != IGNORED
    tally.equal("a third ignored", together[kept], scores(hidden, some, *parameters)[kept])


def check_masked_reduction(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """Sum and mean of the same active values under every padding; inactive places hold NaN."""
    parts = [
        probe((n,), torch.float32, seed=i).to(dtype) for i, n in enumerate(sweep.sample_lengths())
    ]
    flat = torch.cat(parts)
    width = max(map(len, parts))
    expected = torch.stack([masked_sum(flat), masked_mean(flat)])
    for pad in sweep.pads:
        for side in ("left", "right"):
            values = flat.new_full((len(parts), width + pad), float("nan"))
            mask = torch.zeros(values.shape, dtype=torch.bool)
            for row, part in enumerate(parts):
                start = width + pad - len(part) if side == "left" else 0
                values[row, start : start + len(part)] = part
                mask[row, start : start + len(part)] = True
            found = torch.stack([masked_sum(values, mask), masked_mean(values, mask)])
            tally.equal(f"{side} padding {pad}", expected, found, ("sum", "mean").__getitem__)
    tally.equal("run again", expected, torch.stack([masked_sum(flat), masked_mean(flat)]))


def check_gradient_norm(tally: Tally, sweep: Sweep, dtype: torch.dtype) -> None:
    """The norm of the same gradients stored in other ways and computed by other thread counts."""
    del dtype  # gradients are fp32 whatever the model is
    shapes = [(n, 96) for n in sweep.lengths] + [(1_048_583,)]
    gradients = [probe(shape, seed=i, scale=0.01) for i, shape in enumerate(shapes)]
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


def rows_alike(tally: Tally, name: str, sweep: Sweep, op: RowOp, *inputs: Tensor) -> None:
    """Compare rows computed alone with the same rows in calls of many sizes, orders and storages.

    Args:
        tally: counts the comparisons.
        name: of the variant, for the report.
        sweep: sizes of calls.
        op: maps tensors of n rows to a tensor of n rows.
        inputs: tensors [rows, ...]; row i of all of them belongs together.
    """
    rows = len(inputs[0])
    alone = torch.cat([op(*(x[i : i + 1] for x in inputs)) for i in range(rows)]).detach()
    for count in sweep.row_counts():
        part = op(*(x[:count] for x in inputs)).detach()
        tally.equal(f"{name}, {count} rows", alone[:count], part)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    tally.equal(f"{name}, permuted", alone[order], op(*(x[order] for x in inputs)).detach())
    few = min(rows, 17)
    for shift in range(few):
        turned = op(*(x[:few].roll(shift, 0) for x in inputs)).detach()
        tally.equal(f"{name}, row 0 at place {shift}", alone[:few].roll(shift, 0), turned)
    strided = op(*(x.repeat_interleave(2, dim=0)[::2] for x in inputs)).detach()
    tally.equal(f"{name}, strided storage", alone, strided)
    tally.equal(f"{name}, misaligned storage", alone, op(*map(_misaligned, inputs)).detach())


def token_logprob_probe(
    rows: int, dtype: torch.dtype, *, hidden_size: int = 96, vocab_size: int = 331
) -> tuple[Tensor, Tensor, Tensor, SamplingRows]:
    """Hidden states, LM head, targets, and sampling parameters of five kinds in turn."""
    hidden = probe((rows, hidden_size), dtype, seed=1, scale=0.1)
    weight = probe((vocab_size, hidden_size), dtype, seed=2, scale=HEAD_SCALE)
    targets = torch.tensor(probe_tokens([rows], vocab_size, seed=3)[0])
    kinds = (
        SamplingRows.uniform(1),
        SamplingRows.uniform(1, temperature=0.7, top_k=20),
        SamplingRows.uniform(1, temperature=1.3, top_p=0.9),
        SamplingRows.uniform(1, min_p=0.05),
        SamplingRows.uniform(1, temperature=0.0),
    )
    return (
        hidden,
        weight,
        targets,
        SamplingRows.concatenate(list(kinds)).select(torch.arange(rows) % len(kinds)),
    )


def targets_inside(hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows) -> Tensor:
    """The targets, replaced by the most likely token where truncation leaves them out."""
    logprobs, _ = token_logprobs(hidden, weight, targets, rows)
    best = (hidden.double() @ weight.double().t()).argmax(dim=1)
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
