"""A policy in several files, and the index that says which tensor lies in which."""

import json
import shutil

import pytest

from rl_consistency.trainers.config.sections import PolicySection
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy import PolicyError, build_model, load_policy
from tests.trainers.test_policy import AUTO, BYTE, as_bytes, sizes


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
