"""One training step of a whole model, forward and backward, against Hugging Face and its patches.

Timed by the host's clock: what a trainer waits for. All contestants have their own models, which
share the memory of the same random weights, see the same tokens, and begin with no gradient. The
experts of Hugging Face's sparse models run by its grouped products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import build_model, is_sparse, model_config, twin
from benchmarks.peers import batch_invariant_mode, patch_by_liger, peer
from benchmarks.shapes import draw_models
from benchmarks.suite import Case, Suites, cases, of_seed
from benchmarks.timing import UNAVAILABLE, Contestant, Machine, Race, reason
from rl_consistency.models.layer_graphs import CAPTURED_AT
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs

SHORT, MIDDLE, LONG = (16, 1024), (8, 2048), (1, 32768)
"""Sequences and their length."""
SPARSE = ((16, 1024), (4, 4096))


def training_suites() -> Suites:
    """The suite of `python -m benchmarks train`: 16k tokens a step."""
    return {"training_step": _steps(("qwen3-0.6b", "qwen3-1.7b"), (SHORT, MIDDLE))}


def named_training_suites(models: Sequence[str]) -> Suites:
    """The suites of `--model`, mixtures of experts in one of their own; ValueError on a name that
    `model_config` refuses."""
    sparse = [model for model in models if is_sparse(model)]
    dense = [model for model in models if model not in sparse]
    suites = {
        "training_step_named": _steps(dense, (SHORT, MIDDLE, LONG)),
        "training_step_sparse": _steps(sparse, SPARSE),
    }
    return {name: found for name, found in suites.items() if found}


def random_training_suites(seed: int) -> Suites:
    """Small dense models drawn by a seed."""
    return of_seed(seed, {"training_step": _steps(draw_models(seed, 3), (SHORT,))})


def _steps(models: Sequence[str], batches: Sequence[tuple[int, int]]) -> list[Case]:
    sizes = [
        {"model": model, "sequences": sequences, "length": length}
        for model in models
        for sequences, length in batches
    ]
    return cases("training step", training_step, sizes)


def training_step(bench: Machine, model: str, sequences: int, length: int) -> dict[str, Any]:
    """Forward and backward of the mean loss of a model of the benches; of ours also the share of
    the time in which the device waits, of Liger also its peak memory with gradients in fp32."""
    stock_model: Any = build_model(model, bench.device).train()
    own_model, stock_name = twin(stock_model), "hugging face sdpa"
    if is_sparse(model):
        stock_model.set_experts_implementation("grouped_mm")
        stock_name += ", grouped_mm"
    liger_model = twin(stock_model)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model_config(model).vocab_size
    ids = torch.randint(0, vocabulary, (sequences, length), generator=generator).to(bench.device)
    batch = PackedBatch.from_tokens(ids.flatten(), [length] * sequences)

    def hugging_face_loss(model: Any) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def own_loss(model: Any) -> Tensor:
        return -token_logprobs(model, batch, prompt_lengths=[1] * sequences).logprobs.mean()

    stock = partial(_backward, hugging_face_loss, stock_model)
    peers, refused = {}, {}
    try:
        if liger := patch_by_liger(liger_model):
            patched = partial(_backward, hugging_face_loss, liger_model)
            peers["liger"] = Contestant((patched,), liger)
    except UNAVAILABLE as error:
        refused["liger"] = reason(error)
    if peer("batch_invariant_ops"):
        peers["batch_invariant_ops"] = Contestant((stock,), batch_invariant_mode)
    with patch(own_model, grad_dtype=torch.float32):
        own = partial(_backward, own_loss, own_model)
        ours = Contestant((own,), warmups=CAPTURED_AT)  # graphs are captured before the first round
        race = Race(
            ours=ours,
            stock={stock_name: Contestant.of(stock)},
            peers=peers,
            clock="wall",
            tokens=ids.numel(),
            memory=True,
        )
        fields = bench.measure(race) | {"figures": {"idle_share": bench.idle_share(ours)}}
    if "liger" in fields["peers"]:
        peak = _peak_in_fp32(bench, peers["liger"], liger_model)
        fields["peak_bytes"] |= {"liger, fp32 gradients": peak}
    return fields | {"unavailable": refused | fields.get("unavailable", {})}


def _peak_in_fp32(bench: Machine, contestant: Contestant, model: nn.Module) -> int:
    """The peak of a step whose gradients are added to fp32 buffers as they come, as trainers do
    that keep main gradients."""
    sums: dict[Tensor, Tensor] = {}

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter not in sums:
            sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        sums[parameter] += parameter.grad
        parameter.grad = None

    parameters = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(add) for p in parameters]
    try:
        return bench.peak_bytes(contestant)
    finally:
        for hook in hooks:
            hook.remove()


def _backward(loss_of: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    """Forward and backward of a mean loss, gradients dropped; autograd stays in this thread."""
    loss = loss_of(model)
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()
