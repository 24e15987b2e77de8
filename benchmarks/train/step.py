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
from benchmarks.peers import batch_invariant_mode, not_installed, patch_by_liger
from benchmarks.suite import Case, Suite
from benchmarks.timing import UNAVAILABLE, Contestant, Machine, Race
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
    def model() -> Any:
        return build_preset(name, torch.bfloat16, device=bench.device).train()

    stock_model, liger_model, own_model = model(), model(), model()
    generator = torch.Generator().manual_seed(0)
    vocabulary = stock_model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (count, length), generator=generator).to(bench.device)
    stock = hugging_face_step(stock_model, ids)

    peers, unavailable = {}, not_installed("liger_kernel", "batch_invariant_ops")
    try:
        liger = patch_by_liger(liger_model)
    except UNAVAILABLE as error:
        liger, unavailable["liger"] = None, f"{type(error).__name__}: {error}"[:200]
    if liger is not None:
        peers["liger"] = Contestant((hugging_face_step(liger_model, ids),), liger)
    mode = batch_invariant_mode()
    if mode is not None:
        peers["batch_invariant_ops"] = Contestant((stock,), mode)
    with patch(own_model):
        return bench.measure(
            Race(
                ours=Contestant.of(own_step(own_model, ids)),
                stock={"hugging face sdpa": Contestant.of(stock)},
                peers=peers,
                clock="wall",
                tokens=ids.numel(),
                memory=True,
                unavailable=unavailable,
            )
        )


def hugging_face_step(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """Forward and backward of the mean loss over ids [sequences, length], gradients dropped."""

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def own_step(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """The same over the packed tokens of a patched model."""
    count, length = ids.shape
    batch = PackedBatch.from_tokens(ids.flatten(), [length] * count)

    def step() -> Tensor:
        scored = token_logprobs(model, batch, prompt_lengths=[1] * count)
        loss = -scored.logprobs.mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step
