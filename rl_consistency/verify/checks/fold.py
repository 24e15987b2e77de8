"""C3 per op: parameter gradients are left folds, whatever the cut into calls and the filler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.gradient_fold.op import STEP, GradientBuffer
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED, token_logprobs
from rl_consistency.verify.checks.op_setup import OpSetup
from rl_consistency.verify.checks.rows import targets_inside, token_logprob_probe
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.probe import probe, probe_tokens

Backward = Callable[..., None]
"""Runs forward and backward over some rows of every input, folding into buffers."""


def check_linear_fold(tally: Tally, setup: OpSetup) -> None:
    """dW and dbias of `linear`."""
    for inner, columns in setup.shapes.linear if setup.shapes.name else ((96, 208),):
        weight = _parameter((columns, inner), setup, 1)
        bias = _parameter((columns,), setup, 2)
        buffers = GradientBuffer(weight), GradientBuffer(bias)

        def backward(
            x: Tensor,
            dy: Tensor,
            weight: nn.Parameter = weight,
            bias: nn.Parameter = bias,
            buffers: tuple[GradientBuffer, GradientBuffer] = buffers,
        ) -> None:
            linear(x, weight, bias, weight_grad=buffers[0], bias_grad=buffers[1]).backward(dy)

        inputs = (
            probe((setup.rows, inner), setup.dtype, seed=3, device=setup.device),
            probe((setup.rows, columns), setup.dtype, seed=4, device=setup.device),
        )
        _cuts_alike(tally, (weight, bias), backward, inputs)


def check_rms_norm_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of `rms_norm`, for hidden states and for several heads a token."""
    heads = setup.shapes.attention[0]
    for shape in ((1, setup.shapes.norm_widths[0]), (heads.heads, heads.head_dim)):
        weight = _parameter(shape[1:], setup, 1)
        buffer = GradientBuffer(weight)

        def backward(
            x: Tensor,
            dy: Tensor,
            weight: nn.Parameter = weight,
            buffer: GradientBuffer = buffer,
            heads: int = shape[0],
        ) -> None:
            rms_norm(x, weight, 1e-6, rows_per_token=heads, weight_grad=buffer).backward(dy)

        size = (setup.rows, *shape)
        inputs = tuple(probe(size, setup.dtype, seed=s, device=setup.device) for s in (2, 3))
        _cuts_alike(tally, (weight,), backward, inputs)


def check_embedding_fold(tally: Tally, setup: OpSetup) -> None:
    """The gradient of an embedding whose tokens repeat."""
    vocab_size, hidden_size = setup.shapes.vocab_size, setup.shapes.hidden_size
    weight = _parameter((vocab_size, hidden_size), setup, 1)
    buffer = GradientBuffer(weight)

    def backward(tokens: Tensor, dy: Tensor) -> None:
        embedding(tokens, weight, weight_grad=buffer).backward(dy)

    tokens = torch.tensor(probe_tokens([setup.rows], vocab_size, seed=2)[0], device=setup.device)
    dy = probe((setup.rows, hidden_size), setup.dtype, seed=3, device=setup.device)
    _cuts_alike(tally, (weight,), backward, (tokens, dy))


def check_lm_head_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of the LM head inside `token_logprobs`, and its chunks of tokens."""
    hidden, head, targets, sampling = token_logprob_probe(setup.rows, setup)
    inside = targets_inside(hidden, head, targets, sampling)
    plain = SamplingRows.uniform(setup.rows, device=setup.device)
    weight = nn.Parameter(head)
    buffer = GradientBuffer(weight)
    for own_targets, rows in ((inside, sampling), (targets, plain)):

        def backward(
            index: Tensor,
            chunk: int = 1024,
            targets: Tensor = own_targets,
            rows: SamplingRows = rows,
        ) -> None:
            # Filler has index -1: any row, not scored.
            own = targets[index].masked_fill(index < 0, IGNORED)
            logprobs, entropy = token_logprobs(
                hidden[index],
                weight,
                own,
                rows.select(index),
                chunk_tokens=chunk,
                weight_grad=buffer,
            )
            (logprobs.sum() - 0.1 * entropy.sum()).backward()

        index = torch.arange(len(hidden), device=setup.device)
        _cuts_alike(tally, (weight,), backward, (index,), filler=-1)
        weight.grad = None
        backward(index)
        whole = _gradient(weight)
        for chunk in (16, 48):
            weight.grad = None
            backward(index, chunk)
            tally.equal(f"chunk_tokens {chunk}", whole, _gradient(weight))


def _cuts_alike(
    tally: Tally,
    parameters: Sequence[nn.Parameter],
    backward: Backward,
    inputs: Sequence[Tensor],
    *,
    filler: int = 0,
) -> None:
    """Compare gradients of one call with those of the same tokens cut, filled and repeated."""
    rows = len(inputs[0])

    def gradients(cuts: Sequence[int], fill: int = 0) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        edges = [0, *cuts, rows]
        for begin, end in pairwise(edges):
            part = [x[begin:end] for x in inputs]
            backward(*(_filled(x, fill, filler) for x in part))
        return [p.grad.clone() for p in parameters if p.grad is not None]

    whole = gradients(())
    steps = rows // STEP
    ways: dict[str, tuple[Sequence[int], int]] = {
        "run again": ((), 0),
        "one step a call": ([STEP * i for i in range(1, -(-rows // STEP))], 0),
        "two calls": ([STEP * (steps // 2)], 0),
        "uneven cuts": (sorted({STEP * (steps * n // 10) for n in (1, 2, 7)} - {0}), 0),
        "filler of 1 step": ((), 1),
        "cut, filler of 3 steps": ([STEP * (steps // 2)], 3),
    }
    for name, (cuts, fill) in ways.items():
        for expected, actual in zip(whole, gradients(cuts, fill), strict=True):
            tally.equal(name, expected, actual)


def _filled(x: Tensor, steps: int, value: int) -> Tensor:
    """x with whole steps of filler rows after it (its own last step completed first)."""
    if not steps:
        return x
    count = -len(x) % STEP + steps * STEP
    return torch.cat([x, x.new_full((count, *x.shape[1:]), value)])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def _parameter(shape: tuple[int, ...], setup: OpSetup, seed: int) -> nn.Parameter:
    return nn.Parameter(probe(shape, setup.dtype, seed=seed, device=setup.device))
