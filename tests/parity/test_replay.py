import errno
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.parity import replay
from rl_consistency.parity.replay import TEXTS, load_replay_bundle, save_replay_bundle


def arguments(**changes):
    rollout = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5]), torch.tensor([-3.0, math.nan])]
    training = [part.clone() for part in rollout]
    training[0][1] = -2.5
    return {
        "sequences": [[1, 2, 3, 4], [1, 5], [9, 8, 7]],
        "rollout_logprobs": rollout,
        "training_logprobs": training,
        "prompt_lengths": [2, 1, 1],
        "config": {"seed": 3, "algorithm": {"name": "grpo"}},
        "parameter_digest": "ab" * 32,
        "fingerprint": SimpleNamespace(entries={"torch": "2.13"}, digest="cd" * 32),
    } | changes


def test_a_bundle_holds_the_offending_sequences_and_reads_back_bit_for_bit(tmp_path):
    given = arguments()
    path = save_replay_bundle(tmp_path / "replay", **given)
    bundle = load_replay_bundle(path)
    assert bundle.sequence_indices == [0, 2]
    assert bundle.sequences == [[1, 2, 3, 4], [9, 8, 7]] and bundle.prompt_lengths == [2, 1]
    for kept, index in enumerate([0, 2]):
        for side in ("rollout_logprobs", "training_logprobs"):
            saved, original = getattr(bundle, side)[kept], given[side][index]
            assert torch.equal(saved.view(torch.int32), original.view(torch.int32))
    assert bundle.config == given["config"] and bundle.parameter_digest == "ab" * 32
    assert bundle.fingerprint == {"torch": "2.13"} and bundle.fingerprint_digest == "cd" * 32
    drift = bundle.drift()
    assert (drift.tokens, drift.mismatched_tokens, drift.nonfinite_tokens) == (4, 2, 1)


def test_the_same_bundle_again_is_the_same_path(tmp_path):
    first = save_replay_bundle(tmp_path, **arguments())
    assert save_replay_bundle(tmp_path, **arguments()) == first
    assert save_replay_bundle(tmp_path, **arguments(parameter_digest="00")) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_the_texts_of_the_worst_tokens_lie_beside_a_bundle_and_change_no_bit_of_it(tmp_path):
    plain = save_replay_bundle(tmp_path / "plain", **arguments())
    path = save_replay_bundle(tmp_path / "told", **arguments(), decode=lambda ids: f"<{ids}>\n")
    assert json.loads((path / TEXTS).read_text()) == {"4": "<[4]>\n", "7": "<[7]>\n"}
    assert path.name == plain.name and not (plain / TEXTS).exists()
    assert load_replay_bundle(path).sequences == load_replay_bundle(plain).sequences


def test_what_is_no_bundle_is_an_error(tmp_path):
    same = arguments()["rollout_logprobs"][:2]
    sides = {"rollout_logprobs": same, "training_logprobs": same}
    given = arguments(sequences=[[1, 2, 3], [1, 2]], prompt_lengths=[1, 1], **sides)
    with pytest.raises(ValueError, match="nothing to replay"):
        save_replay_bundle(tmp_path, **given)
    with pytest.raises(ValueError, match="2 prompt lengths"):
        save_replay_bundle(tmp_path, **arguments(prompt_lengths=[2, 1]))
    with pytest.raises(FileNotFoundError, match=r"bundle\.json is missing"):
        load_replay_bundle(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_disk_leaves_nothing_behind(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        save_replay_bundle(tmp_path, **arguments())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["bundle.json", "logprobs.safetensors"])
@pytest.mark.parametrize("keep", [0, 10, -5])
def test_a_truncated_bundle_is_refused(tmp_path, file, keep):
    path = save_replay_bundle(tmp_path, **arguments())
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:keep])
    with pytest.raises(ValueError, match=str(os.fspath(path))):
        load_replay_bundle(path)


@pytest.mark.parametrize("change", [{"format": 99}, {"lengths": [1, 2]}, {"surprise": 1}])
def test_files_that_disagree_are_refused(tmp_path, change):
    path = save_replay_bundle(tmp_path, **arguments())
    content = json.loads((path / "bundle.json").read_text())
    (path / "bundle.json").write_text(json.dumps(content | change))
    named = path.rename(path.parent / named_by_content(path))
    with pytest.raises(ValueError, match=str(named)):
        load_replay_bundle(named)


def named_by_content(path):
    """The name that a bundle of these files would have."""
    return replay._name({file: (path / file).read_bytes() for file in replay.FILES})


def test_a_flipped_bit_and_another_name_are_refused(tmp_path):
    path = save_replay_bundle(tmp_path, **arguments())
    data = bytearray((path / "logprobs.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "logprobs.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=f"{path} is damaged or was renamed"):
        load_replay_bundle(path)
    data[-1] ^= 1
    (path / "logprobs.safetensors").write_bytes(data)
    load_replay_bundle(path)
    with pytest.raises(ValueError, match=f"its content is that of {path.name}"):
        load_replay_bundle(path.rename(tmp_path / "other"))
