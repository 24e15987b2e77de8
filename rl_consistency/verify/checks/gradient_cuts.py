"""C3 per op: parameter gradients are left folds, whatever the cut into calls and the filler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED, token_logprobs
from rl_consistency.verify.checks.op_setup import OpSetup
from rl_consistency.verify.checks.rows import targets_inside, token_logprob_probe
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import cuts_alike
from rl_consistency.verify.probe import probe_tokens


def check_linear_fold(tally: Tally, setup: OpSetup) -> None:
    """dW and dbias of `linear`."""
    for inner, columns in setup.shapes.linear if setup.shapes.name else ((96, 208),):
        weight, weight_grad = _parameter(setup.drawn((columns, inner), 1))
        bias, bias_grad = _parameter(setup.drawn((columns,), 2))
        options: dict[str, Any] = {"weight_grad": weight_grad, "bias_grad": bias_grad}
        op = partial(linear, weight=weight, bias=bias, **options)
        inputs = setup.drawn((setup.rows, inner), 3), setup.drawn((setup.rows, columns), 4)
        cuts_alike(tally, (weight, bias), partial(_backward, op), inputs, (1.0, 0.0))


def check_rms_norm_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of `rms_norm`, for hidden states and for several heads a token."""
    shape = setup.shapes.attention[0]
    for heads, width in ((1, setup.shapes.norm_widths[0]), (shape.heads, shape.head_dim)):
        weight, buffer = _parameter(setup.drawn((width,), 1))
        op = partial(rms_norm, weight=weight, eps=1e-6, rows_per_token=heads, weight_grad=buffer)
        inputs = [setup.drawn((setup.rows, heads, width), seed) for seed in (2, 3)]
        cuts_alike(tally, (weight,), partial(_backward, op), inputs, (1.0, 0.0))


def check_embedding_fold(tally: Tally, setup: OpSetup) -> None:
    """The gradient of an embedding whose tokens repeat."""
    vocab_size, hidden_size = setup.shapes.vocab_size, setup.shapes.hidden_size
    weight, buffer = _parameter(setup.drawn((vocab_size, hidden_size), 1))
    op = partial(embedding, weight=weight, weight_grad=buffer)
    tokens = torch.tensor(probe_tokens([setup.rows], vocab_size, seed=2)[0], device=setup.device)
    dy = setup.drawn((setup.rows, hidden_size), 3)
    cuts_alike(tally, (weight,), partial(_backward, op), (tokens, dy))


def check_lm_head_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of the LM head inside `token_logprobs`, and its chunks of tokens."""
    hidden, head, targets, sampling = token_logprob_probe(setup.rows, setup)
    inside = targets_inside(hidden, head, targets, sampling)
    plain = SamplingRows.uniform(setup.rows, device=setup.device)
    weight, buffer = _parameter(head)
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
        gradients = []
        for chunk in (1024, 16, 48):
            weight.grad = None
            run(everything, chunk)
            assert weight.grad is not None
            gradients.append(weight.grad.clone())
            tally.equal(f"chunk_tokens {chunk}", gradients[0], gradients[-1])


def _backward(op: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> None:
    op(x).backward(dy)


def _parameter(values: Tensor) -> tuple[nn.Parameter, GradientBuffer]:
    parameter = nn.Parameter(values)
    parameter.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    return parameter, GradientBuffer(parameter)
