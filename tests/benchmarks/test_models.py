"""Models of the benches by name, and Liger's patches of any family."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama import modeling_llama

from benchmarks import peers
from benchmarks.models import ModelSizes, build_model, model_config
from benchmarks.peers import patch_by_liger

CPU = torch.device("cpu")
SMALL = "{}-2x64-4/2x16-96-331{}"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_name_says_the_sizes_of_a_model(family):
    name = SMALL.format(family, "-tied")
    sizes = ModelSizes.named(name)
    assert sizes == ModelSizes(family, 2, 64, 4, 2, 16, 96, 331, True) and sizes.name == name
    model = build_model(name, CPU)
    assert model.dtype == torch.bfloat16 and model.config.model_type == family
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (331, 64) and len(model.model.layers) == 2
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    untied = build_model(SMALL.format(family, ""), CPU)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_preset_has_its_own_configuration():
    assert model_config("llama3.2-1b").hidden_size == 2048
    assert ModelSizes.named("llama3.2-1b") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "no model 'gpt2'; give tiny-qwen3, "),
        ("gpt2-2x64-4/2x16-96-331", "no model"),
        ("llama-2x64-4/2x16-96-331-big", "no model"),
        ("llama-2x72-5/1x16-96-331", "a multiple of the number of query heads"),
        ("qwen3-2x64-4/2x40-96-331", "head_dim 40"),
    ],
)
def test_another_name_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        model_config(name)


def test_liger_patches_its_model_and_the_modeling_file_only_inside_the_context(monkeypatch):
    norm, forward = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaForCausalLM.forward
    patched = []

    def patch_llama(model):
        patched.append(model)
        modeling_llama.LlamaRMSNorm = "liger's"
        modeling_llama.LlamaForCausalLM.forward = None

    module = SimpleNamespace(apply_liger_kernel_to_llama=patch_llama)
    monkeypatch.setattr(peers, "peer", lambda name: module)
    model = build_model(SMALL.format("llama", ""), CPU)
    context = patch_by_liger(model)
    assert patched == [model] and context is not None
    assert modeling_llama.LlamaRMSNorm is norm
    assert modeling_llama.LlamaForCausalLM.forward is forward
    with context():
        assert modeling_llama.LlamaRMSNorm == "liger's"
    assert modeling_llama.LlamaRMSNorm is norm
    monkeypatch.setattr(peers, "peer", lambda name: None)
    assert patch_by_liger(model) is None
