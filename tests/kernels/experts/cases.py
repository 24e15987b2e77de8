"""A router, its experts and sequences, packed in many ways."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.parity.bytes import same_bytes

LENGTHS = (17, 1, 16, 40, 15, 33)
EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 64, 48, 3


def parameters(dtype, device="cpu", experts=EXPERTS, hidden=HIDDEN, width=WIDTH):
    """Router weight, gate and up, down; gradients in fp32."""
    shapes = ((experts, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    found = []
    for seed, shape in enumerate(shapes, start=1):
        weight = nn.Parameter(probe(shape, dtype, seed, scale=0.25 * shape[-1] ** -0.5).to(device))
        weight.grad_dtype = torch.float32
        found.append(weight)
    return found


def everything(
    own, x, ids, weights, gate_up, down, dy, layout, *, fresh=(True,), wide=torch.float32
):
    """y, dx, dweights and the gradients of gate_up and down, by `cuda` or `cpu`."""
    y, packed, routed = own.experts_fwd(x, ids, weights, gate_up, down, layout, "silu", True)
    dx, dweights, dpacked, weighted = own.experts_bwd(
        dy, routed, weights, gate_up, down, packed, "silu"
    )
    folds = [torch.full(w.shape, torch.nan, dtype=wide) for w in (gate_up, down)]
    for first in fresh:
        own.fold(folds[0], dpacked, x, routed, dy_by_row=False, fresh=first)
        own.fold(folds[1], dy, weighted, routed, dy_by_row=True, fresh=first)
    return [y, dx, dweights, *folds]


@dataclass
class Step:
    """What one optimizer step computes, by sequence, and the gradients of the parameters."""

    outputs: list[Tensor]
    dx: list[Tensor]
    gradients: list[Tensor]

    def equals(self, other):
        ours, theirs = ([*s.outputs, *s.dx, *s.gradients] for s in (self, other))
        return all(same_bytes(a, b) for a, b in zip(ours, theirs, strict=True))


class Block:
    """A mixture of experts with a buffer for each parameter."""

    def __init__(self, dtype=torch.float32, device="cpu", *, top_k=TOP_K, normalize=True, **sizes):
        self.weights = parameters(dtype, device, **sizes)
        self.buffers = [GradientBuffer(weight) for weight in self.weights]
        self.top_k, self.normalize = top_k, normalize
        self.dtype, self.device = dtype, device

    def __call__(self, x, layout, choose=None):
        """The block on rows x; `choose` replaces expert ids."""
        router, gate_up, down = self.weights
        grads = self.buffers
        ids, weights, _ = route_with_logits(
            x, router, self.top_k, normalize=self.normalize, weight_grad=grads[0]
        )
        ids = ids if choose is None else choose(ids)
        return experts(
            *(x, ids, weights, gate_up, down, layout),
            activation="silu", gate_up_grad=grads[1], down_grad=grads[2],
        )  # fmt: skip

    def sequences(self, lengths=LENGTHS):
        """x and dy of each sequence."""
        hidden = self.weights[0].shape[1]
        return [
            tuple(
                probe((n, hidden), self.dtype, 10 * i + j, scale=0.25).to(self.device)
                for j in range(2)
            )
            for i, n in enumerate(lengths, start=1)
        ]

    def step(self, groups, lengths=LENGTHS, *, gap=0, backwards=False, choose=None, filler=0.5):
        """One step over micro-batches `groups` of sequences.

        `gap`: rows of filler beside those that align a sequence, whose gradient is not zero.
        `backwards`: the last sequence lies first. `choose`: see above.
        """
        for weight in self.weights:
            weight.grad = None
        sequences = self.sequences(lengths)
        outputs, dx = [None] * len(lengths), [None] * len(lengths)
        for group in groups:
            starts, rows = {}, 16 * gap
            for i in reversed(group) if backwards else group:
                starts[i], rows = rows, rows + -(-lengths[i] // 16 + -gap) * 16
            spans = {i: slice(starts[i], starts[i] + lengths[i]) for i in group}
            x = sequences[0][0].new_full((rows, sequences[0][0].shape[1]), filler)
            dy = torch.full_like(x, 3.0 if gap else 0.0)
            for i in group:
                x[spans[i]], dy[spans[i]] = sequences[i]
            x.requires_grad_()
            layout = PackedSequences.of([starts[i] for i in group], [lengths[i] for i in group])
            y = self(x, layout, choose)
            y.backward(dy)
            for i in group:
                outputs[i], dx[i] = y.detach()[spans[i]], x.grad[spans[i]]
            owned = torch.zeros(rows, dtype=torch.bool, device=x.device)
            for span in spans.values():
                owned[span] = True
            assert not y.detach()[~owned].any() and not x.grad[~owned].any()
        return Step(outputs, dx, [w.grad.clone() for w in self.weights])


GROUPINGS = (
    [[0], [1], [2], [3], [4], [5]],
    [[0, 1, 2], [3, 4, 5]],
    [[0], [1, 2, 3, 4, 5]],
    [[0, 1, 2, 3, 4], [5]],
    [[0, 1], [2, 3], [4, 5]],
)
WHOLE = [[0, 1, 2, 3, 4, 5]]

EDGES = (0, 1, 15, 16, 17, 32, 33, 64, 65, 128, 129)
"""Rows of experts on both sides of every tile's height."""


def ids_of_counts(counts, top_k):
    """[R, k] ids ascending, by which expert e has counts[e] rows; their sum is R * k, and none has
    more than R. An expert's rows lie apart."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = experts.view(top_k, -1).t()
    assert max(counts) <= len(ids)
    apart = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[apart].sort(dim=-1).values.to(torch.int32)
