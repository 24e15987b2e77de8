"""Training passes of a small model, and what they leave."""

from itertools import count

import torch

from rl_consistency.models.layer_graphs import CAPTURED_AT, layers_op_by_op
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity.bytes import same_bytes
from tests.models.captured.recorded_graphs import recorded

BATCHES = ([40, 3, 17], [64], [1, 1, 50], [16, 15, 20, 2])
"""Lengths of scored tokens; 96, 80, 96 and 96 rows, which one captured call of 96 has room for."""


def tokens(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 60, (n + 1,), generator=generator).tolist() for n in lengths]


def loss(model, lengths, seed=0):
    sequences = tokens(lengths, seed)
    scored = token_logprobs(model, sequences, prompt_lengths=[1] * len(sequences))
    weights = torch.linspace(-1, 2, len(scored.logprobs)).to(scored.logprobs.device)
    return (scored.logprobs * weights).sum() + 0.1 * scored.entropy.sum()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def steps(model, *, micro_batches=2):
    """Losses and gradients of several steps of several micro-batches."""
    found, seeds = [], count()
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        for lengths in BATCHES[:micro_batches]:
            value = loss(model, lengths, next(seeds))
            value.backward()
            found.append(value.detach())
        found.append(gradients(model))
    return found


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return same_bytes(a, b)


def captured_for(model, lengths=BATCHES[0]):
    """Graphs that have captured the rows of these lengths; no gradient is left."""
    graphs = recorded(model)
    for _ in range(CAPTURED_AT):
        loss(model, lengths).backward()
    assert len(graphs) == graphs.replays == 1
    model.zero_grad(set_to_none=True)
    graphs.replays = 0
    return graphs


def alone(model, *seeds, lengths=BATCHES[0]):
    """Gradients of these micro-batches, op by op."""
    model.zero_grad(set_to_none=True)
    with layers_op_by_op():
        for seed in seeds:
            loss(model, lengths, seed).backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found
