"""Tiny models of the covered families."""

import pytest
import torch

from rl_consistency.models.families import FAMILIES
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.verify.presets import (
    PRESETS,
    build_preset,
    preset_config,
)


def test_there_is_a_preset_for_every_covered_family():
    families = {build_preset(name).config.model_type for name in PRESETS}
    assert families == set(FAMILIES)


def test_the_seed_decides_the_weights_and_nothing_else_moves():
    state = torch.random.get_rng_state()
    first = build_preset("tiny-qwen3", seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert parameter_digest(build_preset("tiny-qwen3", seed=3)) == parameter_digest(first)
    assert parameter_digest(build_preset("tiny-qwen3", seed=4)) != parameter_digest(first)


def test_weights_have_outlier_channels():
    weight = build_preset("tiny-llama").model.layers[0].mlp.up_proj.weight.detach()
    sizes = weight.square().mean(0).sqrt().sort().values
    assert sizes[-1] > 3 * sizes[len(sizes) // 2]


def test_a_preset_can_be_cut_to_fewer_layers():
    assert len(build_preset("tiny-llama", num_layers=1).model.layers) == 1
    assert preset_config("qwen3-8b", num_layers=2).num_hidden_layers == 2
    for count in (0, 3):
        with pytest.raises(ValueError, match="tiny-llama has 2 layers"):
            preset_config("tiny-llama", num_layers=count)


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="unknown preset 'tiny-gpt'.*tiny-qwen3"):
        build_preset("tiny-gpt")
    with pytest.raises(TypeError, match="float8"):
        build_preset("tiny-qwen3", torch.float8_e4m3fn)
