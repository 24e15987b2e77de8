"""token_logprobs, forward and backward, against log_softmax of all logits and Liger's fusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import peer
from benchmarks.suite import normal
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import token_logprobs


def logprobs_and_gradients(
    bench: Machine, tokens: int, width: int, vocabulary: int
) -> dict[str, Any]:
    """The mean of all logprobs and its gradients, from no gradient present."""
    hidden, weight = normal(bench, tokens, width), normal(bench, vocabulary, width) * width**-0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    rows = SamplingRows.uniform(tokens, device=bench.device)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
        """One way to compute the loss, on its own leaves that share the data."""
        leaves = [nn.Parameter(x) for x in (hidden, weight)]

        def run() -> Tensor:
            value = loss(*leaves)
            value.backward()
            for leaf in leaves:
                leaf.grad = None
            return value.detach()

        return Contestant.of(run)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        assert isinstance(weight, nn.Parameter)
        weight.grad_dtype = torch.float32  # as the trainer has it
        buffer = GradientBuffer(weight)
        # As training calls it: the check of ids would wait for the device, and no other way has it.
        scored, _ = token_logprobs(
            hidden, weight, targets, rows, weight_grad=buffer, check_targets=False
        )
        return -scored.mean()

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = F.linear(hidden, weight).float().log_softmax(dim=-1)
        return -logprobs.gather(1, targets.unsqueeze(1)).mean()

    peers = {}
    if module := peer("liger_kernel.transformers.fused_linear_cross_entropy"):
        for name, accumulator in (("liger", None), ("liger fp32", torch.float32)):
            loss = module.LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)
            peers[name] = step(lambda hidden, weight, f=loss: f(weight, hidden, targets))
    race = Race(
        ours=step(ours),
        stock={"log_softmax": step(stock)},
        peers=peers,
        # Forward, dhidden and dweight; recomputing the logits is a choice, not the work.
        operations=6.0 * tokens * width * vocabulary,
        memory=True,
    )
    return bench.measure(race)
