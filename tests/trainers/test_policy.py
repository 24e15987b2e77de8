import json
import shutil

import pytest
import torch

from rl_consistency.trainers.config.policy_sections import (
    BuildSection,
    PolicySection,
    TokenizerSection,
)
from rl_consistency.trainers.data.tokenizer import EOS_TOKEN, byte_tokenizer
from rl_consistency.trainers.policy import (
    PolicyError,
    build_model,
    context_length,
    eos_token_ids,
    load_policy,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BYTE, AUTO = TokenizerSection(kind="byte"), TokenizerSection(kind="auto")
FAMILIES = ["qwen3", "llama", "mistral", "qwen2"]


def sizes(architecture="qwen3", **changes):
    return BuildSection(architecture=architecture, **{**SIZES, **changes})


def as_bytes(model):
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy")
    tokenizer = byte_tokenizer()
    build_model(sizes(), tokenizer, seed=3).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_built_policy_has_the_recipe_s_shape(architecture):
    policy = PolicySection(build=sizes(architecture, head_dim=16, rope_theta=5e4))
    model, tokenizer = load_policy(policy, BYTE, seed=0)
    attention = model.model.layers[0].self_attn
    assert type(model).__name__.lower() == f"{architecture}forcausallm"
    assert attention.q_proj.weight.shape == (64, 32)
    assert attention.k_proj.weight.shape == (32, 32)
    assert model.get_input_embeddings().weight.shape == (272, 32)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.rope_parameters["rope_theta"] == 5e4
    assert (model.config.pad_token_id, model.config.eos_token_id) == (256, 258)
    assert eos_token_ids(model, tokenizer) == (258,)
    assert context_length(model) == 64
    assert getattr(model.config, "sliding_window", None) is None


def test_an_untied_policy_has_its_own_head():
    model = build_model(sizes(tie_word_embeddings=False), byte_tokenizer(), seed=0)
    assert model.lm_head.weight is not model.get_input_embeddings().weight


def test_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    first = build_model(sizes(), byte_tokenizer(), seed=7)
    torch.manual_seed(2)
    second = build_model(sizes(), byte_tokenizer(), seed=7)
    other = build_model(sizes(), byte_tokenizer(), seed=8)
    assert as_bytes(first) == as_bytes(second)
    assert as_bytes(first) != as_bytes(other)


def test_building_leaves_the_global_random_state():
    before = torch.get_rng_state()
    build_model(sizes(), byte_tokenizer(), seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_has_the_recipe_s_dtype(saved, dtype):
    for policy in (
        PolicySection(build=sizes(), dtype=dtype),
        PolicySection(path=saved, dtype=dtype),
    ):
        model, _ = load_policy(policy, BYTE, seed=0)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_saved_policy_loads_back_to_the_same_bytes(architecture, tmp_path):
    built, tokenizer = load_policy(PolicySection(build=sizes(architecture)), BYTE, seed=3)
    built.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, own = load_policy(PolicySection(path=tmp_path), AUTO, seed=99)
    assert as_bytes(loaded) == as_bytes(built)
    assert own.eos_token == EOS_TOKEN
    assert own.encode("3+4=é") == tokenizer.encode("3+4=é")


def test_gradient_checkpointing_is_switched_on():
    policy = PolicySection(build=sizes(), gradient_checkpointing=True)
    assert load_policy(policy, BYTE, seed=0)[0].is_gradient_checkpointing


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(PolicyError, match="no model directory .*absent"):
        load_policy(PolicySection(path=tmp_path / "absent"), AUTO, seed=0)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_a_missing_file_is_named(copy, file, message):
    (copy / file).unlink()
    with pytest.raises(ValueError, match=message):
        load_policy(PolicySection(path=copy), AUTO, seed=0)


def test_a_config_that_is_not_json_is_named(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(PolicyError, match=r"config.json is not JSON"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_truncated_weights_are_refused(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PolicyError, match="truncated or damaged"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"num_hidden_layers": 1}])
def test_weights_that_do_not_fit_the_config_are_refused(copy, change):
    edit_config(copy, **change, layer_types=None)
    with pytest.raises(PolicyError, match="do not fit its config.json"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


@pytest.mark.parametrize(
    "change", [{"quantization_config": {"quant_method": "fp8"}}, {"dtype": "float8_e4m3fn"}]
)
def test_fp8_weights_are_refused(copy, change):
    edit_config(copy, **change)
    with pytest.raises(PolicyError, match="quantised weights .*not supported"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_an_unknown_model_type_is_refused_without_running_its_code(copy):
    edit_config(copy, model_type="novel", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(PolicyError, match="cannot be loaded as a causal language model"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    model = build_model(sizes(), byte_tokenizer(), seed=0)
    model.resize_token_embeddings(200)
    for config in (model.config, model.generation_config):
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    model.save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="259 tokens, the model's vocabulary only 200"):
        load_policy(PolicySection(path=tmp_path), BYTE, seed=0)
