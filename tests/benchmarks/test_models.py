"""Models of the benches by name, and Liger's patches of any family."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from benchmarks import peers
from benchmarks.models import (
    SPARSE_PRESETS,
    ModelSizes,
    build_model,
    is_sparse,
    model_config,
    model_presets,
    twin,
)
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
    assert model_presets()[0] == "tiny-qwen3" and set(SPARSE_PRESETS) < set(model_presets())


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [
        ("qwen3-30b-a3b", 48, 30.53),
        ("qwen3-30b-a3b-6l", 6, 4.36),
        ("olmoe-1b-7b", 16, 6.92),
        ("olmoe-1b-7b-12l", 12, 5.24),
        ("mixtral-8x7b", 32, 46.70),
        ("mixtral-8x7b-2l", 2, 3.16),
        ("qwen3-8b-4l", 4, 2.02),
        ("qwen2.5-7b", 28, 7.62),
        ("qwen3-4b", 36, 4.02),
        ("llama3.1-8b", 32, 8.03),
        ("mistral-7b", 32, 7.25),
        ("mistral-7b-8l", 8, 2.01),
    ],
)
def test_a_preset_or_its_first_layers_have_the_published_size(name, layers, billions):
    config = model_config(name)
    assert config.num_hidden_layers == layers and is_sparse(name) == (
        "30b" in name or name[:3] in ("olm", "mix")
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e9 * billions, abs=6e6)


def test_a_twin_shares_the_memory_of_the_weights_and_nothing_else():
    model = build_model("tiny-olmoe", CPU)
    other = twin(model)
    for (name, own), (same, shared) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert name == same and own is not shared and own.data_ptr() == shared.data_ptr()
    other.set_experts_implementation("eager")
    assert model.config._experts_implementation != "eager"
    other(torch.tensor([[1, 2]])).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    tied = twin(build_model(SMALL.format("llama", "-tied"), CPU))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "no model 'gpt2'; give tiny-qwen3, "),
        ("gpt2-2x64-4/2x16-96-331", "no model"),
        ("olmoe-2x64-4/2x16-96-331", "no model"),
        ("gpt2-4l", "no model 'gpt2-4l'"),
        ("mixtral-8x7b-33l", "'mixtral-8x7b' has 32 layers, not 33"),
        ("qwen3-8b-0l", "has 36 layers; num_layers is 0"),
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


def test_a_family_that_liger_does_not_have_is_left_out_and_a_failed_patch_undone(monkeypatch):
    norm = modeling_llama.LlamaRMSNorm
    model = build_model(SMALL.format("llama", ""), CPU)
    monkeypatch.setattr(peers, "peer", lambda name: SimpleNamespace())
    assert patch_by_liger(model) is None

    def fail(model):
        modeling_llama.LlamaRMSNorm = "liger's"
        raise TypeError("experts are not iterable")

    module = SimpleNamespace(apply_liger_kernel_to_llama=fail)
    monkeypatch.setattr(peers, "peer", lambda name: module)
    with pytest.raises(TypeError, match="not iterable"):
        patch_by_liger(model)
    assert modeling_llama.LlamaRMSNorm is norm
