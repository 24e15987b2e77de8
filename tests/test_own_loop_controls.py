"""Negative controls of `test_own_loop.py`: what a loop met without the fold's rules."""

import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models import decoder
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.models.patch import PatchSession, patch
from rl_consistency.models.scoring import scored_rows
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset
from tests.comparison import first_difference

SEQUENCES = probe_tokens((9, 33, 21, 16), 61)


def backward(model, sequences):
    scored = token_logprobs(model, sequences, prompt_lengths=[1] * len(sequences))
    scored.logprobs.sum().backward()


def trained(micro_batch):
    """Weights after two steps of AdamW."""
    model = build_preset("tiny-qwen3", torch.bfloat16)
    with patch(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            for start in range(0, len(SEQUENCES), micro_batch):
                backward(model, SEQUENCES[start : start + micro_batch])
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_adamw_on_gradients_that_autograd_adds_up_depends_on_the_cut(monkeypatch):
    assert first_difference(trained(1), trained(4)) is None
    monkeypatch.setattr(CanonicalModule, "gradient_buffer", lambda module, name: None)
    assert first_difference(trained(1), trained(4)) is not None


def test_adamw_crashes_on_fp32_gradients_of_a_bf16_policy(monkeypatch):
    real = PatchSession._set_gradient_dtype
    monkeypatch.setattr(
        PatchSession, "_set_gradient_dtype", lambda self, dtype: real(self, torch.float32)
    )
    with pytest.raises(RuntimeError, match="expected dtype"):
        trained(4)


def test_without_the_refusal_a_hook_changes_the_earlier_micro_batch_twice(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    gradients = []
    for hook in (None, lambda gradient: gradient * 0.5):
        with patch(model := build_preset("tiny-llama")):
            weight = model.lm_head.weight
            if hook:
                weight.register_hook(hook)
            for sequence in SEQUENCES[:2]:
                backward(model, [sequence])
                gradients.append(weight.grad.clone())
    first, both, _, hooked = gradients
    torch.testing.assert_close(hooked, 0.5 * (0.5 * first + (both - first)))


def test_without_the_refusal_a_penalty_on_gradients_is_dropped(monkeypatch):
    monkeypatch.setattr(scored_rows, "guarded_backward", lambda output, *_: output)
    monkeypatch.setattr(decoder, "guarded_backward", lambda output, *_: output)
    model = build_preset("tiny-llama")
    with patch(model):
        scored = token_logprobs(model, SEQUENCES[:1], prompt_lengths=[1])
        weight = model.lm_head.weight
        (found,) = torch.autograd.grad(scored.logprobs.sum(), weight, create_graph=True)
    assert found.any() and not found.requires_grad
