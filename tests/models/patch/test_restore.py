"""Restoring a model that was changed since it was patched."""

import copy

import pytest
import torch
from torch import nn

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset
from tests.models.patch.tiny_models import tokens


class LoraLinear(nn.Linear):
    """An adapter written by hand: a subclass of the module it replaces."""

    def __init__(self, linear, rank=4):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.down = nn.Parameter(torch.full((rank, linear.in_features), 0.02))
        self.up = nn.Parameter(torch.full((linear.out_features, rank), 0.02))

    def forward(self, input):
        return super().forward(input) + input @ self.down.T @ self.up.T


class Wrapped(nn.Module):
    """An adapter that keeps the module it replaces, as PEFT does."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, input):
        return self.base_layer(input) * 0.5


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens(model, 21), use_cache=False).logits


def adapted(kind):
    def change(model):
        for layer in model.model.layers:
            layer.mlp.up_proj = kind(layer.mlp.up_proj)

    return change


def shorter(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


def without_mlp(model):
    model.model.layers[0].mlp = nn.Identity()


def exchanged(model):
    first, second = model.model.layers
    first.mlp.up_proj, second.mlp.up_proj = second.mlp.up_proj, first.mlp.up_proj


CHANGES = {
    "an adapter in a module's place": adapted(LoraLinear),
    "an adapter around a module": adapted(Wrapped),
    "a layer less": shorter,
    "a module less": without_mlp,
    "modules exchanged": exchanged,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_restore_and_stock_leave_what_was_put_in_since(change):
    model = build_preset("tiny-qwen3")
    expected = copy.deepcopy(model)
    change(expected)
    session = patch(model)
    change(model)
    with session.stock():
        assert torch.equal(logits(model), logits(expected))
    session.restore()
    assert not any(isinstance(module, CanonicalModule) for module in model.modules())
    assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
    assert torch.equal(logits(model), logits(expected))


def test_a_layer_that_was_taken_out_is_restored_too():
    model = build_preset("tiny-qwen3")
    layer = model.model.layers[1]
    with patch(model):
        shorter(model)
    assert not any(isinstance(module, CanonicalModule) for module in layer.modules())
    assert all(p.grad_dtype == p.dtype for p in layer.parameters())
    with patch(model) as session:
        session.verify()


def test_an_adapter_put_into_a_patched_model_is_named_by_every_call():
    model = build_preset("tiny-qwen3")
    session = patch(model)
    adapted(Wrapped)(model)
    refused = r"up_proj \(Wrapped\) has no canonical order.*restore\(\) the session and patch"
    for compute in (logits, lambda m: token_logprobs(m, [[1, 2, 3]], prompt_lengths=[1])):
        with pytest.raises(UnsupportedModelError, match=refused):
            compute(model)
    with pytest.raises(ValueError, match="patched already; restore"):
        patch(model)
    session.restore()
    with pytest.raises(UnsupportedModelError, match=r"up_proj \(Wrapped\) has no canonical"):
        patch(model)
