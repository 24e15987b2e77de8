"""C3 per op: parameter gradients are left folds, whatever the cut into calls and the filler."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_consistency.kernels.embedding.op import embedding
from rl_consistency.kernels.gradient_fold.op import GradientBuffer
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
        weight, weight_grad = _parameter((columns, inner), setup, 1)
        bias, bias_grad = _parameter((columns,), setup, 2)
        options = {"weight_grad": weight_grad, "bias_grad": bias_grad}

        def backward(
            x: Tensor,
            dy: Tensor,
            weight: Tensor = weight,
            bias: Tensor = bias,
            options: dict[str, GradientBuffer] = options,
        ) -> None:
            linear(x, weight, bias, **options).backward(dy)

        inputs = setup.drawn((setup.rows, inner), 3), setup.drawn((setup.rows, columns), 4)
        cuts_alike(tally, (weight, bias), backward, inputs, (1.0, 0.0))


def check_rms_norm_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of `rms_norm`, for hidden states and for several heads a token."""
    shape = setup.shapes.attention[0]
    for heads, width in ((1, setup.shapes.norm_widths[0]), (shape.heads, shape.head_dim)):
        weight, buffer = _parameter((width,), setup, 1)

        def backward(
            x: Tensor,
            dy: Tensor,
            weight: Tensor = weight,
            buffer: GradientBuffer = buffer,
            heads: int = heads,
        ) -> None:
            rms_norm(x, weight, 1e-6, rows_per_token=heads, weight_grad=buffer).backward(dy)

        inputs = [setup.drawn((setup.rows, heads, width), seed) for seed in (2, 3)]
        cuts_alike(tally, (weight,), backward, inputs, (1.0, 0.0))


def check_embedding_fold(tally: Tally, setup: OpSetup) -> None:
    """The gradient of an embedding whose tokens repeat."""
    vocab_size, hidden_size = setup.shapes.vocab_size, setup.shapes.hidden_size
    weight, buffer = _parameter((vocab_size, hidden_size), setup, 1)

    def backward(tokens: Tensor, dy: Tensor) -> None:
        embedding(tokens, weight, weight_grad=buffer).backward(dy)

    tokens = torch.tensor(probe_tokens([setup.rows], vocab_size, seed=2)[0], device=setup.device)
    dy = setup.drawn((setup.rows, hidden_size), 3)
    cuts_alike(tally, (weight,), backward, (tokens, dy))


def check_lm_head_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of the LM head inside `token_logprobs`, and its chunks of tokens."""
    hidden, head, targets, sampling = token_logprob_probe(setup.rows, setup)
    inside = targets_inside(hidden, head, targets, sampling)
    plain = SamplingRows.uniform(setup.rows, device=setup.device)
    weight = nn.Parameter(head)
    buffer = GradientBuffer(weight)
    index = torch.arange(len(hidden), device=setup.device)
    for own_targets, rows in ((inside, sampling), (targets, plain)):

        def backward(
            index: Tensor,
            chunk: int = 1024,
            targets: Tensor = own_targets,
            rows: SamplingRows = rows,
        ) -> None:
            # Filler has index -1: the last row, not scored.
            logprobs, entropy = token_logprobs(
                hidden[index],
                weight,
                targets[index].masked_fill(index < 0, IGNORED),
                rows.select(index),
                chunk_tokens=chunk,
                weight_grad=buffer,
            )
            (logprobs.sum() - 0.1 * entropy.sum()).backward()

        cuts_alike(tally, (weight,), backward, (index,), (-1,))
        gradients = []
        for chunk in (1024, 16, 48):
            weight.grad = None
            backward(index, chunk)
            assert weight.grad is not None
            gradients.append(weight.grad.clone())
            tally.equal(f"chunk_tokens {chunk}", gradients[0], gradients[-1])


def _parameter(
    shape: tuple[int, ...], setup: OpSetup, seed: int
) -> tuple[nn.Parameter, GradientBuffer]:
    parameter = nn.Parameter(setup.drawn(shape, seed))
    return parameter, GradientBuffer(parameter)
