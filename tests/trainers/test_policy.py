"""Policies that are built or loaded, whole or in several files, and what is refused of them."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_consistency.models.patch import patch
from rl_consistency.rollout.tokenizer import eos_token_ids
from rl_consistency.trainers import policy as policy_module
from rl_consistency.trainers.config.sections import BuildSection, PolicySection, TokenizerSection
from rl_consistency.trainers.data.tokenizer import EOS_TOKEN, TokenizerError, byte_tokenizer
from rl_consistency.trainers.policy import (
    build_model,
    load_policy,
    unread_sampling,
)
from rl_consistency.trainers.policy_files import PolicyError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
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
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    policy = PolicySection(build=sizes(architecture, rope_theta=5e4, **heads))
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
    assert model.config.max_position_embeddings == 64
    assert getattr(model.config, "sliding_window", None) is None


def test_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    first = build_model(sizes(), byte_tokenizer(), seed=7)
    torch.manual_seed(2)
    second = build_model(sizes(), byte_tokenizer(), seed=7)
    other = build_model(sizes(), byte_tokenizer(), seed=8)
    assert as_bytes(first) == as_bytes(second)
    assert as_bytes(first) != as_bytes(other)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_saved_policy_loads_back_to_the_same_bytes(architecture, tmp_path):
    built, tokenizer = load_policy(PolicySection(build=sizes(architecture)), BYTE, seed=3)
    built.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, own = load_policy(PolicySection(path=tmp_path), AUTO, seed=99)
    assert as_bytes(loaded) == as_bytes(built)
    assert own.eos_token == EOS_TOKEN
    assert own.encode("3+4=é") == tokenizer.encode("3+4=é")


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


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(PolicyError, match=f"{name} is no regular file"):
        load_policy(PolicySection(path=copy), AUTO, seed=0)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a JSON object is needed, got list"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a":' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_config_that_is_no_json_object_is_named(copy, name, text, message):
    (copy / name).write_text(text)
    with pytest.raises(PolicyError, match=f"/{name}: {message}"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, "cannot be loaded"),
        ({"vocab_size": 1000}, "1 mismatched keys, the first is .*embed_tokens"),
        ({"vocab_size": "x"}, "vocab_size is 'x': give an integer"),
        ({"num_hidden_layers": 3}, r"`num_hidden_layers` \(3\) must be equal"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers is 'x': give an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0: give an integer"),
        ({"num_key_value_heads": 2}, "mismatched keys, the first is .*k_proj"),
        ({"hidden_act": "none such"}, "none such"),
        ({"dtype": "none such"}, "none such"),
        ({"quantization_config": ["int4"]}, "quantised weights .*int4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights .*not supported"),
        ({"dtype": "float8_e4m3fn"}, "quantised weights .*not supported"),
        ({"output_attentions": True}, "could not hold its config.json .*output_attentions"),
    ],
)
@pytest.mark.parametrize("tokenizer", [BYTE, AUTO])
def test_a_wrong_value_of_the_config_is_one_line_that_names_the_directory(
    copy, tokenizer, change, message
):
    edit_config(copy, **change)
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(PolicySection(path=copy), tokenizer, seed=0)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [272, -1, True, "x", [[1]]])
def test_an_end_token_outside_the_vocabulary_is_refused(copy, wrong):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(PolicyError, match="eos_token_id .* is no token .* vocabulary of 272"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_rules_of_a_generation_config_that_a_recipe_replaces_are_told(copy):
    model, _ = load_policy(PolicySection(path=copy), BYTE, seed=0)
    assert unread_sampling(model) is None
    rules = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [3, 258]}
    (copy / "generation_config.json").write_text(json.dumps(rules))
    model, _ = load_policy(PolicySection(path=copy), BYTE, seed=0)
    told = "not read: generation_config.json's temperature=0.6, top_k=20; see rollout.sampling"
    assert unread_sampling(model) == told


def diverge(directory, value):
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][5] = value
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(copy, value):
    diverge(copy, value)
    with pytest.raises(PolicyError, match=r"model\.norm\.weight holds NaN or infinity"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_without_the_check_weights_that_are_not_finite_are_loaded(copy, monkeypatch):
    """Negative control."""
    diverge(copy, float("nan"))
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda tensor: torch.tensor(True))
    model, _ = load_policy(PolicySection(path=copy), BYTE, seed=0)
    assert model(torch.tensor([[1, 2]])).logits.isnan().all()


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e-300},
        YARN | {"attention_factor": 1e300},
        LLAMA3 | {"factor": 1e-300},
    ],
)
def test_rope_without_finite_angles_is_refused_by_its_key(copy, rope):
    edit_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope)
    with pytest.raises(PolicyError, match="config.json: rope_parameters .* not finite") as caught:
        load_policy(PolicySection(path=copy), BYTE, seed=0)
    assert all(key in str(caught.value) for key in rope)


def test_without_the_check_rope_without_finite_angles_makes_every_logit_nan(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(policy_module, "_require_finite", lambda model, source: None)
    built = PolicySection(build=sizes(head_dim=16, rope_theta=1e-300))
    model, _ = load_policy(built, BYTE, seed=0)
    with patch(model):
        assert model(torch.tensor([[1, 2]])).logits.isnan().all()


@pytest.mark.parametrize("eps", [-1.0, -1e-6])
def test_a_negative_rms_norm_eps_is_refused_by_its_key(copy, eps):
    edit_config(copy, rms_norm_eps=eps)
    with pytest.raises(PolicyError, match=rf"config.json: rms_norm_eps {eps} is negative"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_sizes_that_no_machine_holds_are_refused():
    with pytest.raises(PolicyError, match=r"policy\.build: .*: choose smaller sizes"):
        load_policy(PolicySection(build=sizes(hidden_size=10**12, head_dim=16)), BYTE, seed=0)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", '{"a":' + "[" * 100_000])
def test_a_damaged_tokenizer_is_one_line(copy, name, text):
    (copy / name).write_text(text)
    with pytest.raises(TokenizerError, match="holds no tokenizer that can be loaded") as caught:
        load_policy(PolicySection(path=copy), AUTO, seed=0)
    assert "\n" not in str(caught.value)


def test_truncated_weights_are_refused(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PolicyError, match="truncated or damaged"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)


def test_an_unknown_model_type_is_refused_without_running_its_code(copy):
    edit_config(copy, model_type="novel", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(PolicyError, match="auto_map .* code of its own would not run"):
        load_policy(PolicySection(path=copy), BYTE, seed=0)
    edit_config(copy, auto_map=None)
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


@pytest.fixture
def shards(tmp_path):
    """The directory and its index."""
    tokenizer, directory = byte_tokenizer(), tmp_path / "shards"
    build_model(sizes(), tokenizer, seed=3).save_pretrained(directory, max_shard_size="20KB")
    tokenizer.save_pretrained(directory)
    return directory, directory / "model.safetensors.index.json"


def test_a_policy_in_several_files_loads(shards):
    loaded, _ = load_policy(PolicySection(path=shards[0]), AUTO, seed=0)
    assert as_bytes(loaded) == as_bytes(build_model(sizes(), byte_tokenizer(), seed=3))


@pytest.mark.parametrize("place", ["../outside.safetensors", "{parent}/outside.safetensors", ".."])
def test_an_index_that_leaves_the_directory_is_refused(shards, place):
    directory, index = shards
    content = json.loads(index.read_text())
    tensor, name = next(iter(content["weight_map"].items()))
    shutil.copy(directory / name, directory.parent / "outside.safetensors")
    place = place.format(parent=directory.parent)
    content["weight_map"] = {k: place if v == name else v for k, v in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(PolicyError, match=f"index.json: {tensor}: '{place}' is no file beside it"):
        load_policy(PolicySection(path=directory), AUTO, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "a JSON object is needed"),
        ({"metadata": {}}, "weight_map must map"),
        ({"metadata": {}, "weight_map": [1]}, "weight_map must map"),
        ({"metadata": {}, "weight_map": {"a": 1}}, "a: 1 is no file beside it"),
        ({"metadata": {}, "weight_map": {"a": "absent"}}, "a: there is no file absent"),
    ],
)
def test_an_index_that_maps_no_tensors_to_files_is_refused(shards, content, message):
    directory, index = shards
    index.write_text(json.dumps(content))
    with pytest.raises(PolicyError, match=message):
        load_policy(PolicySection(path=directory), AUTO, seed=0)


def in_another_file(content):
    files = content["weight_map"]
    files["model.norm.weight"] = files["model.embed_tokens.weight"]


def left_out(content):
    del content["weight_map"]["model.norm.weight"]


def made_up(content):
    content["weight_map"]["nose"] = content["weight_map"]["model.norm.weight"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (in_another_file, r"model.norm.weight: weight_map says .*-00001-.*, it lies in .*-00005-"),
        (left_out, r"model.norm.weight: weight_map says no file, it lies in .*-00005-"),
        (made_up, r"nose: weight_map says .*-00005-.*, it lies in no file"),
        (lambda content: content.pop("metadata"), "metadata must be a JSON object"),
        (lambda content: content.update(metadata=[1]), "metadata must be a JSON object"),
    ],
    ids=["in another file", "left out", "made up", "no metadata", "a list"],
)
def test_an_index_that_is_not_that_of_its_files_is_refused(shards, edit, message, capfd):
    directory, index = shards
    content = json.loads(index.read_text())
    edit(content)
    index.write_text(json.dumps(content))
    capfd.readouterr()
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(PolicySection(path=directory), BYTE, seed=0)
    assert str(caught.value).startswith(str(index)) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_damaged_file_of_several_is_refused(shards):
    file = sorted(shards[0].glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(PolicyError, match="truncated or damaged"):
        load_policy(PolicySection(path=shards[0]), BYTE, seed=0)
