"""What a canonical module holds of the config, family by family."""

import pytest

from rl_consistency.models.copied_settings import copied_settings
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset

HELD = {
    "tiny-llama": {"activation", "window", "rope_settings"},
    "tiny-mistral": {"activation", "window", "rope_settings"},
    "tiny-olmoe": {"activation", "window", "rope_settings", "normalizes"},
    "tiny-mixtral": {"activation", "window", "rope_settings", "normalizes"},
}


@pytest.mark.parametrize("name", HELD)
def test_a_patched_module_holds_what_is_copied_and_nothing_before(name):
    model, met = build_preset(name), set()
    assert not any(copied_settings(model.config, module) for module in model.modules())
    with patch(model):
        for module in model.modules():
            for key, value in copied_settings(model.config, module).items():
                assert getattr(module, key) == value
                met.add(key)
    assert met == HELD[name]
