"""Hooks that transformers leaves behind: those that collect outputs of stock forwards. The hook of
gradient checkpointing, see test_checkpointing.py."""

import pytest
import torch

from rl_consistency.models import inventory
from rl_consistency.models.hooks_and_checkpointing import captures_outputs
from rl_consistency.models.modules import is_unobserved
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset

PRESETS = ["tiny-qwen3", "tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"]
IDS = torch.tensor([[1, 2, 3]])


def asked_for_outputs(model):
    """A stock forward that puts the hooks there."""
    model(IDS, output_hidden_states=True)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert hooks and all(map(captures_outputs, hooks))


def unobserved(model):
    return [is_unobserved(module) for module in model.modules()]


def scores(model):
    return token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1]).logprobs


@pytest.mark.parametrize("preset", PRESETS)
def test_hooks_that_collect_outputs_do_not_count(preset):
    model = build_preset(preset)
    with patch(model) as session:
        right, before, plain = scores(model), session.check(), unobserved(model)
        with session.stock():
            asked_for_outputs(model)
        assert torch.equal(scores(model), right)
        assert not session.check().hooked and not before.hooked
        assert unobserved(model) == plain and any(plain)
    with patch(model):
        assert torch.equal(scores(model), right)


def test_they_still_collect():
    model = build_preset("tiny-qwen3")
    right = model(IDS, output_hidden_states=True).hidden_states
    with patch(model) as session, session.stock():
        found = model(IDS, output_hidden_states=True).hidden_states
    assert len(found) == len(right) and all(map(torch.equal, found, right))


def test_a_hook_of_its_name_from_elsewhere_is_refused_at_a_router():
    def output_capturing_hook(module, args, output):
        return output

    model = build_preset("tiny-olmoe")
    model.model.layers[0].mlp.gate.register_forward_hook(output_capturing_hook)
    with pytest.raises(ValueError, match="gate.* has a hook"):
        patch(model)


def test_where_nobody_knows_them_they_count(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(inventory, "captures_outputs", lambda hook: False)
    model = build_preset("tiny-olmoe")
    asked_for_outputs(model)
    with pytest.raises(ValueError, match="gate.* has a hook"):
        patch(model)
