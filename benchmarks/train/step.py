"""One training step of a whole model, forward and backward, against Hugging Face and its patches.

Timed by the host's clock: what a trainer waits for. All contestants have their own models with the
same random weights, see the same tokens, and begin with no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.peers import (
    batch_invariant_mode,
    batch_invariant_ops,
    not_installed,
    patch_by_liger,
)
from benchmarks.suite import Case, Suite
from benchmarks.timing import UNAVAILABLE, Contestant, Machine, Race, reason
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset


def training_suites(*, quick: bool = False) -> list[Suite]:
    """The suite of `python -m benchmarks train`: 16k tokens; `quick` keeps the smallest case."""
    cases = training_step_cases(shapes.STEP_MODELS, shapes.STEP_BATCHES)
    return [Suite("training_step", cases[:1] if quick else cases)]


def training_step_cases(models: Sequence[str], batches: Sequence[tuple[int, int]]) -> list[Case]:
    """A step of every preset on every batch of (sequences, tokens of each)."""
    return [
        Case(
            work="training step",
            shape={"model": model, "sequences": count, "length": length},
            run=partial(_step, model, count, length),
        )
        for model in models
        for count, length in batches
    ]


def _step(name: str, count: int, length: int, bench: Machine) -> dict[str, Any]:
    models: list[Any] = [
        build_preset(name, torch.bfloat16, device=bench.device).train() for _ in range(3)
    ]
    stock_model, liger_model, own_model = models
    generator = torch.Generator().manual_seed(0)
    vocabulary = stock_model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (count, length), generator=generator).to(bench.device)
    batch = PackedBatch.from_tokens(ids.flatten(), [length] * count)

    def hugging_face_loss(model: Any) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def own_loss(model: Any) -> Tensor:
        return -token_logprobs(model, batch, prompt_lengths=[1] * count).logprobs.mean()

    stock = partial(_backward, hugging_face_loss, stock_model)
    peers, unavailable = {}, not_installed("liger_kernel", "batch_invariant_ops")
    try:
        if liger := patch_by_liger(liger_model):
            step = partial(_backward, hugging_face_loss, liger_model)
            peers["liger"] = Contestant((step,), liger)
    except UNAVAILABLE as error:
        unavailable["liger"] = reason(error)
    if batch_invariant_ops():
        peers["batch_invariant_ops"] = Contestant((stock,), batch_invariant_mode)
    with patch(own_model, grad_dtype=torch.float32):
        race = Race(
            ours=Contestant.of(partial(_backward, own_loss, own_model)),
            stock={"hugging face sdpa": Contestant.of(stock)},
            peers=peers,
            clock="wall",
            tokens=ids.numel(),
            memory=True,
            unavailable=unavailable,
        )
        return bench.measure(race)


def _backward(loss_of: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    """Forward and backward of a mean loss, gradients dropped."""
    loss = loss_of(model)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()
