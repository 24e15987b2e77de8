"""token_logprobs, forward and backward, against log_softmax of all logits and Liger's fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import liger_cross_entropy, not_installed
from benchmarks.suite import Case, normal
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import token_logprobs


def token_logprobs_cases(tokens: int, widths: Sequence[int], vocabulary: int) -> list[Case]:
    """The mean of all logprobs and its gradients, from no gradient present."""
    return [
        Case(
            work="token_logprobs forward + backward",
            shape={"tokens": tokens, "width": width, "vocabulary": vocabulary},
            run=partial(_logprobs, tokens, width, vocabulary),
        )
        for width in widths
    ]


def _logprobs(tokens: int, width: int, vocabulary: int, bench: Machine) -> dict[str, Any]:
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
        buffer = GradientBuffer(weight)
        return -token_logprobs(hidden, weight, targets, rows, weight_grad=buffer)[0].mean()

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = F.linear(hidden, weight).float().log_softmax(dim=-1)
        return -logprobs.gather(1, targets.unsqueeze(1)).mean()

    peers = {}
    for name, accumulator in (("liger", None), ("liger fp32", torch.float32)):
        loss = liger_cross_entropy(accumulator)
        if loss is not None:
            peers[name] = step(lambda hidden, weight, f=loss: f(weight, hidden, targets))
    race = Race(
        ours=step(ours),
        stock={"log_softmax": step(stock)},
        peers=peers,
        unavailable=not_installed("liger_kernel"),
        # Forward, dhidden and dweight; recomputing the logits is a choice, not the work.
        operations=6.0 * tokens * width * vocabulary,
        memory=True,
    )
    return bench.measure(race)
