"""What a canonical module holds of the config, family by family, and that it may not change."""

import pytest
from transformers.activations import ACT2FN

from rl_consistency.models import families, inventory
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.inventory import copied_settings
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset
from tests.models.inventory.scores import scores

DENSE, SPARSE = ("tiny-llama", "tiny-mistral"), ("tiny-olmoe", "tiny-mixtral")


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_a_patched_module_holds_what_is_copied_and_nothing_before(name):
    model, met = build_preset(name), set()
    assert not any(copied_settings(model.config, module) for module in model.modules())
    with patch(model):
        for module in model.modules():
            for key, value in copied_settings(model.config, module).items():
                assert getattr(module, key) == value
                met.add(key)
    of_routers = {"normalizes"} if name in SPARSE else set()
    assert met == {"activation", "window", "rope_settings", *of_routers}


def _on_all(model, name, value):
    for module in model.modules():
        if hasattr(module, name):
            setattr(module, name, value)


def _routes_normalized(model):
    model.config.norm_topk_prob = not model.config.norm_topk_prob
    _on_all(model, "norm_topk_prob", model.config.norm_topk_prob)


def _activates_by_gelu(model):
    model.config.hidden_act = "gelu"
    _on_all(model, "act_fn", ACT2FN["gelu"])


def _turns_faster(model):
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    other = families.stock_class(type(model.model.rotary_emb))(model.config)
    model.model.rotary_emb.inv_freq = other.inv_freq
    model.model.rotary_emb.original_inv_freq = other.original_inv_freq


COPIED = [
    ("tiny-qwen3-moe", _routes_normalized, "normalizes"),
    ("tiny-qwen3-moe", _activates_by_gelu, "activation"),
    ("tiny-llama", _activates_by_gelu, "activation"),
    ("tiny-qwen3", _turns_faster, "rope_settings"),
]


@pytest.mark.parametrize("name, change, copied", COPIED)
def test_a_config_changed_with_its_modules_after_patch_is_refused(name, change, copied):
    """The patched forward would go on with what it was patched with."""
    model = build_preset(name)
    with patch(model):
        scores(model)
        change(model)
        with pytest.raises(UnsupportedModelError, match=f"patched with {copied}="):
            scores(model)
    with patch(model):
        scores(model)


@pytest.mark.parametrize("name, change, copied", COPIED)
def test_without_the_comparison_the_old_values_go_on(name, change, copied, monkeypatch):
    """Negative control."""
    model = build_preset(name)
    with patch(model):
        scores(model)  # the rotary table is made
        monkeypatch.setattr(inventory, "copied_settings", lambda config, module: {})
        change(model)
        found = scores(model)
    with patch(model):
        assert (found - scores(model)).abs().max() > 1e-3
