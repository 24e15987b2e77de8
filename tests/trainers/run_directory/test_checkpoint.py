"""What a checkpoint holds, random states among it, and what is left of one that was interrupted."""

import json
import math
import os
import random
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_consistency.models.patch import patch
from rl_consistency.numerics.files import remove_leftovers, seal, unseal, write_whole
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy import build_model
from rl_consistency.trainers.run_directory import checkpoint
from rl_consistency.trainers.run_directory.checkpoint import (
    OPTIMIZER,
    STATE,
    WEIGHTS,
    CheckpointError,
    capture,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    read_weights,
    restore,
    save_checkpoint,
    save_weights,
    seeded,
)


def built(architecture="qwen3", *, seed=1, dtype=torch.float32, **changes):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    build = BuildSection(architecture=architecture, **sizes | changes)
    return build_model(build, byte_tokenizer(), seed=seed, dtype=dtype)


def save(directory, *, model=None, step=1, keep=9, **changes):
    model = built() if model is None else model
    moments = {f"{n}.exp_avg": torch.full_like(p, 0.5) for n, p in model.named_parameters()}
    given = {
        "optimizer": moments,
        "schedule": {"last_epoch": step, "_last_lr": [1e-3 / 3]},
        "totals": {"drift": {}, "gradient_checks": 2},
        "extra": {"loss": math.nan},
        "fingerprint": fingerprint(),
    } | changes
    return save_checkpoint(
        directory, step=step, model=model, tokenizer=byte_tokenizer(), keep=keep, **given
    )


def contents(directory):
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_reads_back_what_was_written(tmp_path, dtype):
    model = built(dtype=dtype)
    path = save(tmp_path, model=model, step=30)
    assert path.name == "step_000030"
    loaded = load_checkpoint(path, fingerprint())
    other = built(seed=2, dtype=dtype)
    places = [p.data_ptr() for p in other.parameters()]
    load_weights(other, loaded.weights)
    assert parameter_digest(other) == parameter_digest(model)
    assert [p.data_ptr() for p in other.parameters()] == places
    assert other.lm_head.weight is other.get_input_embeddings().weight
    assert (loaded.step, loaded.path) == (30, path)
    assert loaded.schedule == {"last_epoch": 30, "_last_lr": [1e-3 / 3]}
    assert loaded.totals == {"drift": {}, "gradient_checks": 2}
    assert math.isnan(loaded.extra["loss"])
    assert all((tensor == 0.5).all() for tensor in loaded.optimizer.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral", "qwen2"])
def test_a_checkpoint_of_a_patched_policy_is_a_hugging_face_model(tmp_path, architecture, tied):
    model = built(architecture, dtype=torch.bfloat16, tie_word_embeddings=tied)
    with patch(model):
        path = save(tmp_path, model=model)
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is type(model) and loaded.dtype == torch.bfloat16
    assert parameter_digest(loaded) == parameter_digest(model)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert AutoTokenizer.from_pretrained(path).encode("3+4=") == byte_tokenizer().encode("3+4=")


def test_pruning_keeps_the_newest(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step=step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000100"]


def test_a_checkpoint_that_is_there_is_not_replaced(tmp_path):
    path = save(tmp_path, model=built(seed=1))
    before = contents(path)
    with pytest.raises(CheckpointError, match=f"{path.name}.*not empty"):
        save(tmp_path, model=built(seed=2))
    assert contents(path) == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_leftovers_of_a_kill_are_not_listed_and_are_removed_by_name_alone(tmp_path):
    path = save(tmp_path, step=1)
    shutil.copytree(path, tmp_path / f".rl_consistency-{'0123' * 8}")
    shutil.copytree(path, tmp_path / "step_000002.partial")
    (tmp_path / "step_000003").mkdir()
    (tmp_path / ".rl_consistency-link").symlink_to(path)
    assert list_checkpoints(tmp_path) == [path]
    remove_leftovers(tmp_path)
    left = [".rl_consistency-link", "step_000001", "step_000002.partial", "step_000003"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    load_checkpoint(path, fingerprint())


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "one bit"])
def test_a_damaged_file_is_refused(tmp_path, file, damage):
    path = save(tmp_path)
    data = bytearray((path / file).read_bytes())
    if damage == "missing":
        (path / file).unlink()
    elif damage == "truncated":
        (path / file).write_bytes(data[:-10])
    else:
        data[-1] ^= 1
        (path / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{file} is missing, truncated or damaged.*before"):
        load_checkpoint(path, fingerprint())


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}', "[]", "\udcff"])
def test_a_damaged_state_file_is_refused(tmp_path, text):
    path = save(tmp_path)
    (path / STATE).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(path, fingerprint())


def test_a_state_file_of_an_older_version_is_refused_by_name(tmp_path):
    path = save(tmp_path)
    state = unseal(path / STATE)
    (path / STATE).write_text(json.dumps({**state, "format": 1, "sha256": {WEIGHTS: "0"}}))
    with pytest.raises(CheckpointError, match=rf"{STATE}.*an older rl_consistency wrote it"):
        load_checkpoint(path, fingerprint())
    (path / STATE).write_text(seal({**state, "format": 2}))
    with pytest.raises(CheckpointError, match=rf"{STATE} is not of checkpoint format 3"):
        load_checkpoint(path, fingerprint())


def test_any_flipped_bit_of_the_state_file_is_seen(tmp_path):
    path = save(tmp_path)
    data = (path / STATE).read_bytes()
    for position in range(0, 8 * len(data), 97):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        (path / STATE).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=STATE):
            load_checkpoint(path, fingerprint())


def test_without_its_seal_a_flipped_bit_of_the_state_file_resumes(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(checkpoint, "unseal", lambda file: json.loads(file.read_bytes()))
    path = save(tmp_path)
    text = (path / STATE).read_text()
    (path / STATE).write_text(text.replace('"gradient_checks": 2', '"gradient_checks": 3'))
    assert load_checkpoint(path, fingerprint()).totals["gradient_checks"] == 3


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 1},
        {"architecture": "llama"},
        {"tie_word_embeddings": False},
        {"dtype": torch.bfloat16},
    ],
)
def test_another_model_s_weights_are_refused_and_nothing_is_copied(tmp_path, other):
    weights = load_checkpoint(save(tmp_path), fingerprint()).weights
    model = built(**{"seed": 2} | other)
    before = parameter_digest(model)
    with pytest.raises(CheckpointError, match="does not fit the policy: .* the first is "):
        load_weights(model, weights)
    assert parameter_digest(model) == before


@contextmanager
def largest_file(size):
    """Writes beyond `size` bytes of any one file fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", WEIGHTS, OPTIMIZER, STATE, "generation_config.json"]
)
def test_a_disk_that_fills_up_at_any_file_leaves_the_previous_checkpoint_whole(tmp_path, file):
    first = save(tmp_path, step=1, keep=1)
    before = contents(tmp_path)
    with (
        largest_file((first / file).stat().st_size // 2),
        pytest.raises(CheckpointError, match="cannot write the checkpoint .*free some space"),
    ):
        save(tmp_path, step=2, keep=1)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert list_checkpoints(tmp_path) == [first]
    load_checkpoint(first, fingerprint())
    assert save(tmp_path, step=2, keep=1).name == "step_000002"


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupt_in_the_middle_of_a_save_leaves_the_previous_checkpoint(
    tmp_path, monkeypatch, call
):
    first = save(tmp_path, step=1, keep=1)
    before = contents(tmp_path)
    real, calls = checkpoint.save_file, []

    def interrupted(tensors, path, **given):
        real(tensors, path, **given)
        calls.append(path)
        if len(calls) == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, step=2, keep=1)
    assert contents(tmp_path) == before and list_checkpoints(tmp_path) == [first]
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_an_interrupt_in_the_middle_of_pruning_lists_only_whole_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, step=1)

    def interrupted(path, **given):
        if (path / WEIGHTS).is_file():
            (path / WEIGHTS).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", interrupted)
        save(tmp_path, step=2, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002"]
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_weights_alone_are_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "reference.safetensors"
    model = built()
    digest = save_weights(file, model)
    assert parameter_digest(read_weights(file, digest)) == parameter_digest(model)
    before = file.read_bytes()
    with largest_file(1000), pytest.raises(CheckpointError, match="cannot write .*reference"):
        save_weights(file, built(seed=2))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
    for damage in (before[:-10], before[:20] + b"!" + before[21:], None):
        file.unlink() if damage is None else file.write_bytes(damage)
        with pytest.raises(CheckpointError, match="reference.safetensors is missing, damaged"):
            read_weights(file, digest)


def test_a_disk_that_fills_up_before_the_first_checkpoint_does_not_advise_to_resume(tmp_path):
    with largest_file(1000), pytest.raises(CheckpointError) as error:
        save(tmp_path)
    assert "no checkpoint yet: free some space" in str(error.value)
    assert "begin again with overwrite" in str(error.value) and "resume" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_files_of_a_run_have_the_rights_that_the_user_s_mask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        path = save(tmp_path / "run")
        write_whole(tmp_path / "run" / "text", "text")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "run" / "text").stat().st_mode & 0o777 == 0o640


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1)


def test_a_captured_state_gives_the_same_draws_after_json():
    draws()
    state = json.loads(json.dumps(capture()))
    expected = draws()
    assert draws() != expected
    restore(state)
    assert draws() == expected


def test_seeded_blocks_repeat_and_leave_no_trace_even_on_an_error():
    before = capture()
    with seeded(3):
        first = draws()
    with pytest.raises(RuntimeError), seeded(3):
        assert draws() == first
        raise RuntimeError
    assert capture() == before


def test_the_state_of_a_gpu_in_use_is_kept_and_put_back(monkeypatch):
    state = torch.tensor([7, 0, 255, 3], dtype=torch.uint8)
    given = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    captured = json.loads(json.dumps(capture()))
    restore(captured)
    assert torch.equal(given[0], state)
    restore(captured | {"cuda": None})
    assert len(given) == 1
