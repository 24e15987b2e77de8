"""A run resumes only with the data, rewards, tokenizer, policy and metrics it was begun with."""

import json
import shutil
import sys

import pytest
from transformers import PreTrainedTokenizerBase

from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory import directory, manifest, step_files
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.directory import RunDirectoryError, check_directory

STEPS = {"training.steps": 4, "training.save_every": 2, "training.keep_checkpoints": 3}


@pytest.fixture
def given(tiny_run):
    """A recipe whose policy, tokenizer and data are files."""
    return {
        **STEPS,
        **tiny_run.save_model(),
        "data.task": None,
        "data.path": str(tiny_run.example_file()),
        "data.eval_path": str(tiny_run.example_file(5, "eval.jsonl")),
    }


def stopped(tiny_run, given):
    """Run to the end, and take the last checkpoint away; returns the digest at the end."""
    summary, _ = tiny_run(**given)
    shutil.rmtree(tiny_run.directory / "run" / "checkpoints" / "step_000004")
    return summary["parameter_digest"]


def edited(name, old, new):
    """Puts another text into a file."""

    def edit(directory):
        file = directory / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
        sys.modules.pop("toy_rewards", None)

    return edit


def swap_lines(directory):
    file = directory / "train.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*rest, first]))


def add_line(directory):
    with (directory / "train.jsonl").open("a") as stream:
        stream.write(json.dumps({"question": "9+9=", "answer": "18"}) + "\n")


def other_settings(name, **changes):
    """Puts other values into a file of JSON."""

    def edit(directory):
        file = directory / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


edit_reward = edited("toy_rewards.py", "% 7 / 7", "% 5 / 5")


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (edited("train.jsonl", '"answer": "24"', '"answer": "25"'), "training data"),
        (swap_lines, "training data"),
        (add_line, "training data"),
        (edited("eval.jsonl", '"answer": "4"', '"answer": "5"'), "evaluation data"),
        (edit_reward, "reward function toy_rewards:varied"),
        (
            edited("model/tokenizer_config.json", '"split_special_tokens": true,', ""),
            "tokenizer",
        ),
        (other_settings("config.json", rms_norm_eps=1e-5), "policy's config"),
        (other_settings("generation_config.json", eos_token_id=[258, 48]), "policy's config"),
        (None, "policy's weights"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_edited_input_is_refused_by_name(tiny_run, given, edit, name):
    stopped(tiny_run, given)
    before = tiny_run.files()
    if edit is None:
        tiny_run.save_model(seed=3)
    else:
        edit(tiny_run.directory)
    with pytest.raises(CheckpointError, match=f"another fingerprint: {name}: "):
        tiny_run(**given, resume=True)
    assert tiny_run.files() == before


def test_a_run_goes_on_with_other_checks_and_another_cut_of_its_work(tiny_run, given, lasting):
    """What the questions about memory and drift advise has to work on the run they are for."""
    digest = stopped(tiny_run, given)
    others = {
        "consistency.on_drift": "warn",
        "consistency.gradient_check_every": 2,
        "consistency.shadow_every": 3,
        "policy.gradient_checkpointing": True,
        "rollout.num_kv_blocks": 12,
        "rollout.max_num_seqs": 3,
        "rollout.prefill_chunk_size": 2,
        "rollout.prefix_sharing": False,
        "rollout.cuda_graphs": False,
        "training.micro_batch_size": 3,
        "training.layout": "padded",
        "training.eval_every": 1,
    }
    resumed, _ = tiny_run(**given | others, resume=True)
    assert resumed["parameter_digest"] == digest


def test_the_cut_decides_where_ops_are_stock(tiny_run):
    """Negative control."""
    stock = {**STEPS, "consistency.strict_except": ["linear"]}
    stopped(tiny_run, stock)
    with pytest.raises(CheckpointError, match="training.micro_batch_size: 3 != 8"):
        tiny_run(**stock | {"training.micro_batch_size": 3}, resume=True)


@pytest.mark.parametrize(
    ("edit", "digests"), [(swap_lines, "data_digests"), (edit_reward, "reward_digests")]
)
def test_without_its_digest_an_edited_input_resumes_another_run(
    tiny_run, given, edit, digests, monkeypatch
):
    """Negative control."""
    monkeypatch.setattr(run, digests, lambda *given: {})
    digest = stopped(tiny_run, given)
    edit(tiny_run.directory)
    summary, _ = tiny_run(**given, resume=True)
    assert summary["parameter_digest"] != digest


def test_inputs_that_moved_are_the_same_inputs(tiny_run, given):
    digest = stopped(tiny_run, given)
    moved = tiny_run.directory / "moved"
    moved.mkdir()
    for key in ("policy.path", "data.path", "data.eval_path"):
        given[key] = shutil.move(given[key], moved)
    summary, _ = tiny_run(**given, resume=True)
    assert summary["parameter_digest"] == digest


@pytest.mark.parametrize("name", ["metrics.jsonl", "digests.jsonl"])
def test_steps_with_a_hole_are_refused(tiny_run, given, name):
    stopped(tiny_run, given)
    file = tiny_run.directory / "run" / name
    (file.parent / "digests.jsonl").open("a").write("after the checkpoint")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[1:]))
    tiny_run.refused(ValueError, rf"{name}.* changed since", **given, resume=True)


def test_without_their_digest_metrics_with_a_hole_are_summed_up(tiny_run, given, monkeypatch):
    """Negative control."""
    stopped(tiny_run, given)
    file = tiny_run.directory / "run" / "metrics.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[1])
    cut = lambda path, state: path.read_bytes()[: state["bytes"]]  # noqa: E731
    monkeypatch.setattr(step_files, "kept_rows", cut)
    for module in (directory, manifest):
        monkeypatch.setattr(module, "is_written", lambda file, states: True)
    summary, rows = tiny_run(**given, resume=True)
    assert summary["steps"] == 4 and [row["step"] for row in rows] == [2, 3, 4]


@pytest.mark.parametrize(
    "torn", [b"", b'{"st', b'{"step": 4, "rewa', b'{"step": 4, \0\0\0', b"\0\0"]
)
def test_a_line_after_the_checkpoint_may_be_torn(tiny_run, given, torn):
    digest = stopped(tiny_run, given)
    file = tiny_run.directory / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + torn)
    summary, rows = tiny_run(**given, resume=True)
    assert summary["parameter_digest"] == digest and [row["step"] for row in rows] == [1, 2, 3, 4]


def link_data(directory):
    (directory / "train.jsonl").unlink()
    (directory / "train.jsonl").symlink_to(directory / "run" / "metrics.jsonl")


def link_weights(directory):
    """As one would save space."""
    checkpoint = directory / "run" / "checkpoints" / "step_000004"
    (directory / "model" / "model.safetensors").unlink()
    (directory / "model" / "model.safetensors").symlink_to(checkpoint / "model.safetensors")


def link_in_a_circle(directory):
    link_weights(directory)
    for name, target in (("a", "b"), ("b", "a")):
        (directory / "model" / name).symlink_to(target)


@pytest.mark.parametrize(
    ("link", "file"),
    [
        (link_data, "data.path .*train.jsonl"),
        (link_weights, "policy.path .*model/model.safetensors"),
        (link_in_a_circle, "policy.path .*model/model.safetensors"),
    ],
)
def test_inputs_that_links_lead_into_the_run_are_not_overwritten(tiny_run, given, link, file):
    tiny_run(**given)
    link(tiny_run.directory)
    tiny_run.refused(RunDirectoryError, rf"{file} lies inside the run in", **given, overwrite=True)


def test_a_reward_model_inside_the_run_is_not_overwritten(tiny_run, finished):
    finished(**{"training.steps": 3})
    model = tiny_run.directory / "run" / "checkpoints" / "step_000003"
    config = tiny_run.config(**{"reward.functions": [{"model": str(model)}]})
    with pytest.raises(RunDirectoryError, match=r"functions.0.model .*step_000003 lies inside the"):
        check_directory(config, resume=False, overwrite=True)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), Exception("File too large (os error 27)")]
)
def test_a_temporary_folder_without_room_is_named_with_what_helps(tiny_run, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"tokenizer.*(No space|too large).*TMPDIR") as caught:
        tiny_run()
    assert "\n" not in str(caught.value) and not (tiny_run.directory / "run").exists()
