"""Hooks of a layer's attention see its input where stock transformers passes it: by name."""

import copy

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset

IDS = torch.tensor([[5, 7, 11, 3, 2]])


def scaled(value):
    return 1.5 * value if isinstance(value, torch.Tensor) else value


def scales_input_by_name(attention):
    def hook(module, args, kwargs):
        return args, kwargs | {"hidden_states": scaled(kwargs["hidden_states"])}

    attention.register_forward_pre_hook(hook, with_kwargs=True)


def scales_arguments(attention):
    """Without effect in stock transformers: there are none without a name."""
    attention.register_forward_pre_hook(lambda module, args: tuple(map(scaled, args)))


def adds_input(attention):
    def hook(module, args, kwargs, output):
        assert not args
        return output[0] + kwargs["hidden_states"], *output[1:]

    attention.register_forward_hook(hook, with_kwargs=True)


def halves_gradients(attention):
    """Of arguments without a name: without effect."""
    attention.register_full_backward_hook(
        lambda module, grads, _: tuple(None if grad is None else 0.5 * grad for grad in grads)
    )


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama", "tiny-mixtral"])
@pytest.mark.parametrize(
    "hooked", [scales_input_by_name, scales_arguments, adds_input, halves_gradients]
)
def test_a_hook_of_attention_does_what_it_does_in_stock_transformers(preset, hooked):
    model = build_preset(preset)
    hooked(model.model.layers[1].self_attn)
    stock = copy.deepcopy(model)
    with patch(model):
        logits = model(IDS).logits
        logits.square().mean().backward()
    expected = stock(IDS).logits
    expected.square().mean().backward()
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    for parameter, right in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad, rtol=2e-3, atol=2e-6)
