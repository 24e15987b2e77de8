"""What of a model directory transformers would cast or pass over in silence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_consistency.trainers import policy as policy_module
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy import build_model, read_config, read_model
from rl_consistency.trainers.policy_files import PolicyError
from rl_consistency.trainers.run_directory import checkpoint

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
}
QUERY, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A dense model and a mixture of experts."""
    directory, experts = tmp_path_factory.mktemp("policies"), {"count": 4, "per_token": 2}
    for name, options in (("llama", {}), ("qwen3_moe", {"experts": experts})):
        section = BuildSection(architecture=name, **SIZES, **options)
        build_model(section, byte_tokenizer(), seed=3).save_pretrained(directory / name)
    return directory


@pytest.fixture
def model(saved, tmp_path):
    return shutil.copytree(saved / "llama", tmp_path / "llama")


@pytest.fixture
def mixture(saved, tmp_path):
    return shutil.copytree(saved / "qwen3_moe", tmp_path / "qwen3_moe")


def rewrite(directory, **changed):
    """Save tensors, by their names with dots."""
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **changed}
    save_file(
        {k: v.clone() for k, v in tensors.items() if v is not None}, file, metadata={"format": "pt"}
    )


def read(directory):
    return read_model(directory, torch.float32)


CAST = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F64": torch.float64,
}


@pytest.mark.parametrize("name", CAST)
def test_a_tensor_that_would_be_cast_is_refused_by_its_name(model, mixture, name):
    rewrite(model, **{QUERY: load_file(model / "model.safetensors")[QUERY].to(CAST[name])})
    with pytest.raises(PolicyError, match=f"model.safetensors: {QUERY} is {name}, .* F32, BF16"):
        read(model)
    expert = "model.layers.0.mlp.experts.2.down_proj.weight"
    weight = load_file(mixture / "model.safetensors")[expert].to(CAST[name])
    rewrite(mixture, **{expert: weight})
    with pytest.raises(PolicyError, match=f"model.safetensors: {expert} is {name}"):
        read(mixture)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_rounded_to_the_dtype_that_is_asked_for(model, dtype):
    weight = load_file(model / "model.safetensors")[QUERY].to(dtype)
    rewrite(model, **{QUERY: weight})
    read_weight = read_model(model, torch.bfloat16).state_dict()[QUERY]
    assert read_weight.equal(weight.to(torch.bfloat16))


def test_without_the_check_the_imaginary_part_is_lost(model, monkeypatch):
    """Negative control."""
    real = load_file(model / "model.safetensors")[QUERY]
    rewrite(model, **{QUERY: torch.complex(real, torch.ones_like(real))})
    monkeypatch.setattr(policy_module, "check_weights", lambda directory: {})
    assert read(model).state_dict()[QUERY].equal(real)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "an adapter, .* merged"),
        ("adapter_model.safetensors", "an adapter, .* merged"),
        ("pytorch_model.bin", "would not be read: remove it"),
        ("pytorch_model-00001-of-00002.bin", "would not be read: remove it"),
        ("pytorch_model.bin.index.json", "would not be read: remove it"),
        ("model.safetensors.index.json", "model.safetensors lies beside it"),
        ("model-00002-of-00002.safetensors", "would not be read"),
        ("model.fp16.safetensors", "would not be read"),
        ("consolidated.safetensors", "would not be read"),
    ],
)
def test_a_file_that_would_be_passed_over_is_refused(model, file, message):
    (model / file).write_text("{}")
    with pytest.raises(PolicyError, match=f"{file}: {message}"):
        read(model)


def test_a_checkpoint_of_ours_is_a_policy(model):
    for name in checkpoint._TENSORS:
        shutil.copy(model / "model.safetensors", model / f"{name}.safetensors")
    read(model)


def test_a_shard_that_no_index_names_and_a_tensor_in_two_shards_are_refused(model, tmp_path):
    shards = tmp_path / "shards"
    read(model).save_pretrained(shards, max_shard_size="20KB")
    first, second, *_ = sorted(shards.glob("model-*.safetensors"))
    shutil.copy(first, shards / "model-00009-of-00009.safetensors")
    with pytest.raises(PolicyError, match="model-00009-of-00009.safetensors: would not be read"):
        read(shards)
    (shards / "model-00009-of-00009.safetensors").unlink()
    tensor, value = next(iter(load_file(first).items()))
    tensors = {**load_file(second), tensor: value + 1}
    save_file(tensors, second, metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=f"{second.name}: {tensor} lies in {first.name} too"):
        read(shards)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("lm_head.weight", EMBEDDING),
        ("norm.weight", "model.norm.weight"),
        ("model.model.norm.weight", "model.norm.weight"),
    ],
)
def test_two_names_of_one_parameter_need_one_value(model, name, of):
    weight = load_file(model / "model.safetensors")[of]
    rewrite(model, **{name: weight})
    assert read(model).state_dict()[of].equal(weight)
    rewrite(model, **{name: weight + 1})
    with pytest.raises(PolicyError, match=f"{name}.* one parameter, and their values differ"):
        read(model)


def test_stored_angles_have_to_be_those_of_the_configuration(model):
    own = read(model).model.rotary_emb.inv_freq
    for dtype in (torch.float32, torch.bfloat16):
        rewrite(model, **{FREQUENCIES: own.to(dtype)})
        read(model)
    for name, wrong in ((FREQUENCIES, own * 1.1), (f"{FREQUENCIES}_extra", own[:-1])):
        rewrite(model, **{FREQUENCIES: None, name: wrong})
        with pytest.raises(PolicyError, match=f"{name} has other angles than config.json"):
            read(model)


def test_another_architecture_than_that_of_the_model_type_is_refused(model):
    """A Mistral's tensors are named as a Llama's, which has no sliding window."""
    edit(model, architectures=["MistralForCausalLM"], sliding_window=4)
    with pytest.raises(PolicyError, match="architectures are .*Mistral.* makes a LlamaForCausalLM"):
        read(model)


def edit(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", -32, "give an integer of at least 1"),
        ("hidden_size", 32.0, "give an integer of at least 1"),
        ("intermediate_size", True, "give an integer of at least 1"),
        ("num_hidden_layers", 0, "give an integer of at least 1"),
        ("num_attention_heads", "2", "give an integer of at least 1"),
        ("num_key_value_heads", 0, "give an integer of at least 1"),
        ("head_dim", -16, "give an integer of at least 1"),
        ("vocab_size", 0, "give an integer of at least 1"),
        ("max_position_embeddings", -1, "give an integer of at least 1"),
        ("sliding_window", 0, "give an integer of at least 1"),
        ("num_key_value_heads", 3, "num_attention_heads 2 is no multiple"),
        ("rope_parameters", ROPE | {"rope_theta": "1e4"}, "rope_theta is '1e4': give a number"),
        ("rope_parameters", ROPE | {"factor": [2]}, r"factor is \[2\]: give a number"),
        ("rope_parameters", ROPE | {"factor": -2}, "factor is -2: give a number above 0"),
        ("rope_parameters", ROPE | {"rope_type": "x"}, "rope_type is 'x': give one of default"),
        ("rope_parameters", {"full_attention": ROPE | {"factor": "2"}}, "full_attention: factor"),
        ("rope_parameters", ROPE | {"rope_theta": True}, "rope_theta is True: give a number"),
        ("rope_parameters", ROPE | {"rope_theta": None}, "rope_theta is None: give a number"),
        ("rope_parameters", ROPE | {"rope_type": "default"}, "factor has no meaning with"),
        ("rope_parameters", ROPE | {"type": "yarn"}, "type and rope_type differ"),
        ("rope_scaling", ROPE | {"factor": "2"}, "factor is '2': give a number"),
        ("rope_theta", 5e5, "500000.0 contradicts rope_parameters"),
        ("auto_map", {"AutoModelForCausalLM": "own.Llama"}, "code of its own would not run"),
        ("transformers_weights", "other.safetensors", "other weights than"),
        ("fusion_config", {"mlp": True}, "not covered"),
        ("rope_scaling", ROPE, "contradicts rope_parameters"),
    ],
)
def test_a_number_of_the_config_without_meaning_is_refused_by_its_key(model, key, value, message):
    edit(model, **{key: value})
    with pytest.raises(PolicyError, match=f"config.json: .*{message}") as caught:
        read_config(model)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_experts_per_tok", 0, "give an integer of at least 1"),
        ("num_experts_per_tok", 9, "num_experts_per_tok 9 exceeds the 4 experts"),
        ("moe_intermediate_size", -1, "give an integer of at least 1"),
        ("decoder_sparse_step", 0, "give an integer of at least 1"),
    ],
)
def test_a_number_of_a_mixture_without_meaning_is_refused_by_its_key(mixture, key, value, message):
    edit(mixture, **{key: value})
    with pytest.raises(PolicyError, match=f"config.json: .*{message}") as caught:
        read_config(mixture)
    assert key in str(caught.value)
