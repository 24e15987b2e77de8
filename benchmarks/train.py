"""One training step of a whole model, forward and backward, against Hugging Face and its patches.

Timed by the host's clock: what a trainer waits for. All contestants have their own models, which
share the memory of the same random weights, see the same tokens, and begin with no gradient. The
experts of Hugging Face's sparse models run by its grouped products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import build_model, is_sparse, model_config, twin
from benchmarks.peers import patch_by_liger
from benchmarks.shapes import draw_models
from benchmarks.suite import Choice, Suites, cases
from benchmarks.timing import UNAVAILABLE, Contestant, Machine, reason
from rl_consistency.models.layer_graphs import CAPTURED_AT
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs

SHORT, MIDDLE, LONG = (16, 1024), (8, 2048), (1, 32768)
"""Sequences and their length."""


def training_suites(choice: Choice) -> Suites:
    """16k tokens a step; of named models mixtures of experts in a suite of their own."""
    suites: dict[str, list[Any]] = {}
    models, name, dense = ("qwen3-0.6b", "qwen3-1.7b"), "training_step", (SHORT, MIDDLE)
    sparse = (SHORT, (4, 4096))
    if choice.seed is not None:
        models, dense = draw_models(choice.seed, 3), (SHORT,)
    elif choice.models:
        models, name, dense = choice.models, "training_step_named", (SHORT, MIDDLE, LONG)
    if choice.tiny:
        models = choice.models or ("tiny-qwen3", "tiny-olmoe")
        dense = sparse = ((2, 32),)
    for model in models:
        experts = is_sparse(model)
        sizes = [
            {"model": model, "sequences": count, "length": length}
            for count, length in (sparse if experts else dense)
        ]
        suite = suites.setdefault("training_step_sparse" if experts else name, [])
        suite += cases("training step", training_step, sizes)
    return suites


def training_step(bench: Machine, model: str, sequences: int, length: int) -> dict[str, Any]:
    """Forward and backward of the mean loss of a model of the benches."""
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

    def backward(loss_of: Callable[[Any], Tensor], model: nn.Module) -> Tensor:
        """Gradients are dropped; autograd stays in this thread."""
        loss = loss_of(model)
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    peers, refused = {}, {}
    try:
        if liger := patch_by_liger(liger_model):
            patched = partial(backward, hugging_face_loss, liger_model)
            peers["liger"] = Contestant([patched], liger)
    except UNAVAILABLE as error:
        refused["liger"] = reason(error)
    # Graphs are captured before the first round.
    ours = Contestant([partial(backward, own_loss, own_model)], warmups=CAPTURED_AT)
    stock = {stock_name: Contestant([partial(backward, hugging_face_loss, stock_model)])}
    sizes = {"tokens": ids.numel(), "memory": True}
    with patch(own_model, grad_dtype=torch.float32):
        fields = bench.measure(ours=ours, stock=stock, peers=peers, clock="wall", **sizes)
    return fields | {"unavailable": refused | fields.get("unavailable", {})}
