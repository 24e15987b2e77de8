"""Models of the benches by name, shapes drawn by a seed, and Liger's patches of any family."""

from random import Random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from benchmarks import peers
from benchmarks.models import build_model, is_sparse, model_config, twin
from benchmarks.peers import patch_by_liger
from benchmarks.shapes import (
    EXPERTS,
    HEAD_DIMS,
    MODELS,
    TUNED_WIDTHS,
    draw_experts,
    draw_heads,
    draw_models,
    draw_products,
    weights_of,
)

CPU = torch.device("cpu")
SMALL = "{}-2x64-4/2x16-96-331{}"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_name_says_the_sizes_of_a_model(family):
    name = SMALL.format(family, "-tied")
    model = build_model(name, CPU)
    config = model.config
    assert model.dtype == torch.bfloat16 and config.model_type == family
    assert (config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (2, 96, 331)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [
        ("qwen3-30b-a3b", 48, 30.53),
        ("olmoe-1b-7b-12l", 12, 5.24),
        ("mixtral-8x7b-2l", 2, 3.16),
        ("qwen3-8b-4l", 4, 2.02),
        ("qwen2.5-7b", 28, 7.62),
        ("qwen3-4b", 36, 4.02),
        ("llama3.1-8b", 32, 8.03),
        ("mistral-7b-8l", 8, 2.01),
    ],
)
def test_a_preset_or_its_first_layers_have_the_published_size(name, layers, billions):
    config = model_config(name)
    assert config.num_hidden_layers == layers
    assert is_sparse(name) == name.startswith(("qwen3-30b", "olmoe", "mixtral"))
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
    other(torch.tensor([[1, 2]])).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "no model 'gpt2'; give tiny-qwen3, "),
        ("olmoe-2x64-4/2x16-96-331", "no model"),
        ("mixtral-8x7b-33l", "'mixtral-8x7b' has 32 layers, not 33"),
        ("llama-2x72-5/1x16-96-331", "a multiple of the number of query heads"),
        ("qwen3-2x64-4/2x40-96-331", "head_dim 40"),
    ],
)
def test_another_name_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        model_config(name)


def test_liger_patches_its_model_and_the_modeling_file_only_inside_the_context(monkeypatch):
    norm, forward = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaForCausalLM.forward

    def patch_llama(model):
        modeling_llama.LlamaRMSNorm = "liger's"
        modeling_llama.LlamaForCausalLM.forward = None
        if model.failing:
            raise TypeError("experts are not iterable")

    module = SimpleNamespace(apply_liger_kernel_to_llama=patch_llama)
    monkeypatch.setattr(peers, "peer", lambda name: module)
    model = build_model(SMALL.format("llama", ""), CPU)
    model.failing = False
    context = patch_by_liger(model)
    assert modeling_llama.LlamaRMSNorm is norm
    assert modeling_llama.LlamaForCausalLM.forward is forward
    with context():
        assert modeling_llama.LlamaRMSNorm == "liger's"
    model.failing = True
    with pytest.raises(TypeError, match="not iterable"):
        patch_by_liger(model)
    assert modeling_llama.LlamaRMSNorm is norm
    for absent in (None, SimpleNamespace()):
        monkeypatch.setattr(peers, "peer", lambda name, found=absent: found)
        assert patch_by_liger(model) is None


def test_drawn_models_are_distinct_and_of_no_table():
    drawn = draw_models(7, 40)
    assert draw_models(7, 20) == drawn[:20] and len(set(drawn)) == 40
    widths = {model_config(name).hidden_size for name in drawn}
    assert not widths & set(TUNED_WIDTHS)
    tuned = {n for weight in weights_of(MODELS) for n in weight}
    assert set(TUNED_WIDTHS) <= tuned


def test_products_have_rows_of_every_band_and_fit():
    drawn = [size for _, size in draw_products(Random(0), draw_models(0, 20))]
    assert len(drawn) == 4 * len(weights_of(draw_models(0, 20)))
    for shape in drawn:
        m, small, large = shape["m"], *sorted((shape["n"], shape["k"]))
        assert small % 16 == large % 16 == 0 and large <= 262144
        assert m * large <= 2048 * 262144


def test_drawn_heads_and_experts_fit():
    rng = Random(0)
    for dim in HEAD_DIMS:
        for _ in range(30):
            heads, kv_heads = map(int, draw_heads(rng, dim)["heads"].split("/"))
            assert heads % kv_heads == 0 and heads * dim <= 8192 and kv_heads * dim <= 2048
    assert all(draw_experts(rng) not in EXPERTS for _ in range(100))
