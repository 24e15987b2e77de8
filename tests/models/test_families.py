import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from rl_consistency.models import families
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import PRESETS, build_preset, preset_config


@pytest.mark.parametrize("preset", PRESETS)
def test_every_module_with_a_forward_of_its_own_has_a_mixin_or_is_a_container(preset):
    model = build_preset(preset)
    known = families.mixins(model.config).keys() | {nn.ModuleList}
    inside_mlp = {id(m.act_fn) for m in model.modules() if hasattr(m, "act_fn")}
    left = {type(m) for m in model.modules() if id(m) not in inside_mlp} - known
    assert left == set()


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
UNCOVERED = [
    (
        {"rope_parameters": DYNAMIC},
        r"'dynamic' \(covered: default, linear, llama3, yarn\)",
    ),
    ({"attention_dropout": 0.1}, r"active dropout attention_dropout=0.1 \(set it to 0.0\)"),
    ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ({"rms_norm_eps": 0.0}, r"rms_norm_eps=0.0, .* NaN .*\(covered: above 0\)"),
    ({"head_dim": -16}, r"head_dim -16 \(covered: multiples of 16 up to 256\)"),
    ({"quantization_config": {"bits": 8}}, "quantization_config"),
    ({"hidden_act": "relu", "attention_dropout": 0.1}, "hidden_act.*active dropout"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "attention_heads=4 .*value_heads=3"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer types linear_attention"),
]


@pytest.mark.parametrize("changes, message", UNCOVERED)
def test_an_uncovered_setting_is_named(changes, message):
    config = preset_config("tiny-llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        families.check_config(config)


def test_fp8_and_mixed_dtypes_are_refused():
    model = build_preset("tiny-llama")
    families.check_parameters(model)
    model.lm_head.bfloat16()
    mixed = r"lm_head.weight is torch.bfloat16, the first is torch.float32.*model.to\(dtype\)"
    for module, message in (
        (model, mixed),
        (nn.Linear(4, 4).to(torch.float8_e4m3fn), "float8_e4m3fn.*fp8 is not covered"),
        (nn.Linear(4, 4).double(), "weight is torch.float64"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            families.check_parameters(module)


def test_windows_follow_each_familys_own_rule():
    for preset, expected in (("tiny-mistral", 100), ("tiny-llama", None), ("tiny-qwen3", None)):
        model = build_preset(preset)
        attention = model.model.layers[0].self_attn
        assert families.window_of(model.config, attention) == expected


@pytest.mark.parametrize("window", [0, -4])
@pytest.mark.parametrize("preset", ["tiny-mistral", "tiny-mixtral", "tiny-qwen3"])
def test_a_window_that_is_not_positive_is_named_where_a_forward_reads_it(preset, window):
    config = preset_config(preset)
    config.sliding_window = window
    with pytest.raises(UnsupportedModelError, match=f"sliding_window={window} .covered: 1 or more"):
        families.check_config(config)
    config = preset_config("tiny-llama")
    config.sliding_window = window
    families.check_config(config)


@pytest.mark.parametrize("size", [0, -64])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
@pytest.mark.parametrize("name", families.SIZES)
def test_a_size_that_is_not_positive_is_named(preset, name, size):
    config = preset_config(preset)
    if hasattr(config, name):
        setattr(config, name, size)
        with pytest.raises(UnsupportedModelError, match=f"{name}={size}"):
            families.check_config(config)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(preset_config("tiny-llama"))
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.weight is on the meta device"):
        patch(model)


def test_no_other_model_is_made_of_the_class_of_a_patched_one(tmp_path):
    model = build_preset("tiny-llama")
    model.save_pretrained(tmp_path)
    with patch(model):
        made = "class of a patched module; .*modeling_llama.LlamaForCausalLM"
        with pytest.raises(TypeError, match=made):
            type(model)(model.config)
        with pytest.raises(TypeError, match=made):
            type(model).from_pretrained(tmp_path)
        assert type(LlamaForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM
    assert type(type(model)(model.config)) is LlamaForCausalLM
