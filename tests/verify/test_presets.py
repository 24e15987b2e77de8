"""Tiny models of the covered families."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_consistency.models.families import FAMILIES, check_config
from rl_consistency.models.patch import patch
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.verify.presets import (
    PRESETS,
    REAL_PRESETS,
    build_preset,
    known_presets,
    preset_config,
)


def test_there_is_a_preset_for_every_covered_family():
    families = {build_preset(name).config.model_type for name in PRESETS}
    assert families == set(FAMILIES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_patched_in_every_dtype(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = build_preset(name, dtype)
        with patch(model) as session:
            session.verify()
            assert not session.report().unsupported


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


def test_presets_have_what_their_family_adds():
    assert build_preset("tiny-qwen2").model.layers[0].self_attn.q_proj.bias is not None
    assert hasattr(build_preset("tiny-qwen3").model.layers[0].self_attn, "q_norm")
    assert build_preset("tiny-mistral").config.sliding_window == 100
    assert build_preset("tiny-llama").config.rope_parameters["rope_type"] == "llama3"
    qwen3, llama = build_preset("tiny-qwen3"), build_preset("tiny-llama")
    assert qwen3.lm_head.weight is qwen3.model.embed_tokens.weight
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight


@pytest.mark.parametrize("name", REAL_PRESETS)
def test_a_model_of_real_shape_has_the_published_configuration(name):
    config = preset_config(name)
    check_config(config)
    assert config.head_dim == (64 if name in ("qwen2.5-0.5b", "llama3.2-1b") else 128)
    assert config.num_attention_heads % config.num_key_value_heads == 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = {"qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-8b": 8.2, "llama3-8b": 8.0}
    billions |= {"qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54}
    billions |= {"llama3.2-1b": 1.24, "llama3.2-3b": 3.21}
    count = sum(p.numel() for p in model.parameters()) / 1e9
    assert count == pytest.approx(billions[name], abs=0.05)


def test_a_preset_can_be_cut_to_fewer_layers():
    assert len(build_preset("tiny-llama", num_layers=1).model.layers) == 1
    assert preset_config("qwen3-8b", num_layers=2).num_hidden_layers == 2
    for count in (0, 3):
        with pytest.raises(ValueError, match="tiny-llama has 2 layers"):
            preset_config("tiny-llama", num_layers=count)


def test_names_are_unique():
    assert len(set(known_presets())) == len(PRESETS) + len(REAL_PRESETS)


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="unknown preset 'tiny-gpt'.*tiny-qwen3"):
        build_preset("tiny-gpt")
    with pytest.raises(TypeError, match="float8"):
        build_preset("tiny-qwen3", torch.float8_e4m3fn)
