"""What may be another when a run resumes, and what is cleaned up or named then."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl_consistency.cli import report
from rl_consistency.cli.main import main
from rl_consistency.numerics import files
from rl_consistency.trainers import run
from rl_consistency.trainers.config.recipe import find_recipe, load_config
from rl_consistency.trainers.run_directory import checkpoint, inputs
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.directory import RunDirectoryError
from rl_consistency.trainers.run_directory.step_files import read_changes


@pytest.mark.thorough
def test_a_run_directory_that_moved_resumes(tiny_run, lasting, lasting_summary):
    summary, rows = tiny_run(**tiny_run.LONG)
    moved = tiny_run.directory / "elsewhere" / "run"
    moved.parent.mkdir()
    shutil.move(tiny_run.directory / "run", moved)
    shutil.rmtree(moved / "checkpoints" / "step_000006")
    changes = tiny_run.LONG | {"run.output_dir": str(moved)}
    resumed, resumed_rows = tiny_run(**changes, resume=True)
    assert lasting(resumed_rows) == lasting(rows) and lasting_summary(resumed) == lasting_summary(
        summary
    )
    assert load_config(moved / "config.yaml").run.output_dir == moved


def test_where_every_key_binds_a_moved_run_is_refused(tiny_run, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(inputs, "FREE", {})
    tiny_run(**{"training.steps": 1})
    moved = tiny_run.directory / "elsewhere"
    shutil.move(tiny_run.directory / "run", moved)
    with pytest.raises(CheckpointError, match=r"run\.output_dir: .*elsewhere"):
        tiny_run(**{"training.steps": 1, "run.output_dir": str(moved)}, resume=True)


def test_a_run_from_before_norms_were_left_out_of_weight_decay_is_refused(tiny_run, monkeypatch):
    """Its moments would fit, and its norms decayed."""
    known, changes = inputs.settings, {"training.steps": 1, "optimizer.weight_decay": 0.1}
    without = lambda config: {k: v for k, v in known(config).items() if "decay_norms" not in k}  # noqa: E731
    monkeypatch.setattr(run, "settings", without)
    tiny_run(**changes)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"optimizer\.decay_norms: false != absent"):
        tiny_run(**changes | {"training.steps": 2}, resume=True)


@pytest.mark.thorough
@pytest.mark.parametrize("done", [2, 4])
def test_a_run_given_more_steps_ends_as_one_begun_with_them(tiny_run, lasting, done):
    changes = {**tiny_run.LONG, "optimizer.schedule": "constant", "training.eval_every": 0}
    summary, rows = tiny_run.of_its_own("whole", **changes)
    short, short_rows = tiny_run(**changes | {"training.steps": done})
    assert lasting(short_rows) == lasting(rows)[: done + 1]
    resumed, resumed_rows = tiny_run(**changes, resume=True)
    assert lasting(resumed_rows) == lasting(rows)
    assert resumed["parameter_digest"] == summary["parameter_digest"] != short["parameter_digest"]


DEMO = find_recipe("grpo_arithmetic_tiny_cpu")
RATES = {"optimizer.schedule": "cosine", "training.steps": 4}
OTHER = {
    "optimizer.learning_rate": 4e-3,
    "optimizer.schedule": "linear",
    "optimizer.min_lr_ratio": 0.25,
    "training.steps": 5,
}


def test_another_rate_and_schedule_keep_the_moments_and_are_recorded(tiny_run, lasting, capsys):
    """The steps after are those of a run that was handed the new optimizer by hand."""
    saves = {"training.save_every": 2, "training.keep_checkpoints": 3}
    given, changed = {**RATES, **saves}, {**saves, **OTHER}
    _, whole = tiny_run.of_its_own("whole", **given)
    tiny_run.directory.joinpath("whole").rename(tiny_run.directory / "run")
    shutil.rmtree(tiny_run.directory / "run/checkpoints/step_000004")
    shutil.copytree(tiny_run.directory / "run", tiny_run.directory / "same")
    said = []
    _, rows = tiny_run(**changed, resume=True, announce=said.append)
    assert lasting(rows)[:2] == lasting(whole)[:2] and len(rows) == 5
    # Linear from 4e-3 to a quarter of it in five steps, of which two are done.
    shares = [0.25 + 0.75 * (5 - done) / 5 for done in (2, 3, 4)]
    assert [r["learning_rate"] for r in rows[2:]] == pytest.approx([4e-3 * s for s in shares])
    assert rows[2]["loss"] == whole[2]["loss"]  # the weights of step 2 are the same
    moments = load_file(tiny_run.directory / "run/checkpoints/step_000004/optimizer.safetensors")
    assert {float(v) for k, v in moments.items() if k.endswith(".step")} == {4.0}
    old = {"optimizer.learning_rate": 0.01, "optimizer.schedule": "cosine"}
    old |= {"optimizer.min_lr_ratio": 0.0, "training.steps": 4}
    found = read_changes(tiny_run.directory / "run")
    assert {key: (step, was, now) for step, key, was, now in found} == {
        key: (3, old[key], OTHER[key]) for key in OTHER
    }
    assert any("learning_rate: 0.01 until now, 0.004 from here on" in line for line in said)
    page = report.render(tiny_run.directory / "run").read_text()
    assert "Changes of the recipe" in page and "optimizer.min_lr_ratio" in page
    # Unchanged a run goes on as if never stopped, and records nothing.
    _, same = tiny_run.of_its_own("same", **given, resume=True)
    assert lasting(same) == lasting(whole)
    assert not (tiny_run.directory / "same" / "changes.jsonl").exists()
    assert "Changes of" not in report.render(tiny_run.directory / "same").read_text()
    runs = [str(tiny_run.directory / name) for name in ("same", "run")]
    assert main(["diff", *runs]) == 1
    assert (
        "B  optimizer.schedule: cosine before step 3, linear from it on" in capsys.readouterr().out
    )
    # What was changed after the checkpoint that a run goes on from is taken back with its steps.
    for step in (4, 5):
        shutil.rmtree(tiny_run.directory / f"run/checkpoints/step_{step:06d}")
    _, again = tiny_run(**given, resume=True)
    assert lasting(again) == lasting(whole) and read_changes(tiny_run.directory / "run") == []


@pytest.mark.parametrize("key", ["optimizer.weight_decay", "optimizer.max_grad_norm"])
def test_other_keys_of_the_optimizer_are_refused_as_before(tiny_run, finished, key):
    finished(**{"training.steps": 3})
    changes = {"training.steps": 4, "optimizer.learning_rate": 1e-3, key: 0.5}
    tiny_run.refused(CheckpointError, f"fingerprint: {key}: 0.5 != ", **changes, resume=True)


def test_a_constant_rate_may_come_to_an_end_and_go_on_again(tiny_run, finished):
    """A constant schedule does not depend on training.steps; one that ends does."""
    finished(**{"training.steps": 3})
    ends = {"optimizer.schedule": "linear", "optimizer.min_lr": 2e-3, "training.steps": 4}
    _, rows = tiny_run(**ends, resume=True)
    assert rows[-1]["learning_rate"] == pytest.approx(4e-3)  # a quarter of 8e-3 above 2e-3
    _, rows = tiny_run(**{"training.steps": 5}, resume=True)
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-2] * 3 + [4e-3, 1e-2])
    assert [step for step, key, *_ in read_changes(tiny_run.directory / "run")] == [4, 4, 5, 5]


@pytest.mark.parametrize(
    ("name", "section", "key"),
    [
        ("optimizer.name=muon", "optimizer.muon", "adamw_learning_rate"),
        ("algorithm.name=ppo", "algorithm.ppo", "critic_learning_rate"),
    ],
)
def test_a_rate_of_a_section_that_was_left_out_may_change(name, section, key):
    """null stands for the section's defaults."""
    overrides = [name, "consistency.strict=false"]
    before = inputs.settings(load_config(DEMO, overrides))
    after = inputs.settings(load_config(DEMO, [*overrides, f"{section}.{key}=0.5"]))
    assert {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} == {
        f"{section}.{key}"
    }


def test_fewer_steps_than_are_done_are_refused(tiny_run, finished):
    finished(**{"training.steps": 3})
    with pytest.raises(RunDirectoryError, match=r"training\.steps: 2 are fewer than the 3 steps"):
        tiny_run(**{"training.steps": 2}, resume=True)


def test_how_long_a_reward_may_take_is_free_and_how_it_is_called_is_not(tiny_run):
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write("def both(completions, **_): return [float(len(c)) for c in completions]\n")
    term = {"name": "toy_rewards:both"}
    changes = {"reward.functions": [term], "training.steps": 1}
    tiny_run(**changes)
    free = {"training.steps": 2, "reward.timeout": 60, "tracking.samples": 0}
    tiny_run(**changes | free, resume=True)
    changes = {"reward.functions": [term | {"signature": "trl"}], "training.steps": 3}
    with pytest.raises(CheckpointError, match=r"reward\.functions: .*trl.* != .*ours"):
        tiny_run(**changes, resume=True)


def left_by_a_kill(tiny_run, monkeypatch):
    """A run killed while it removes a checkpoint, and resumed: its leftovers before and after."""
    changes = {"training.save_every": 1, "training.keep_checkpoints": 1}

    def killed(path, **given):
        if (Path(path) / "trainer.json").is_file():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files.shutil, "rmtree", killed)
        tiny_run(**changes)
    directory = tiny_run.directory / "run"
    before = list(directory.rglob(".rl_consistency-*"))
    tiny_run(**changes, resume=True)
    return before, list(directory.rglob(".rl_consistency-*"))


def test_what_a_kill_left_is_removed_when_the_run_resumes(tiny_run, monkeypatch):
    before, after = left_by_a_kill(tiny_run, monkeypatch)
    assert before and not after
    checkpoints = tiny_run.directory / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_000003"]


def test_without_the_removal_what_a_kill_left_stays(tiny_run, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(run, "remove_leftovers", lambda directory: None)
    before, after = left_by_a_kill(tiny_run, monkeypatch)
    assert before and after == before


@pytest.mark.parametrize("name", ["step_9", "step_000009", "step_2"])
def test_a_misnamed_checkpoint_is_named_with_what_to_do(tiny_run, lasting, name):
    changes = {"training.save_every": 1, "training.keep_checkpoints": 1}
    _, rows = tiny_run(**changes)
    checkpoints = tiny_run.directory / "run" / "checkpoints"
    misnamed = (checkpoints / "step_000003").rename(checkpoints / name)
    tiny_run.refused(
        CheckpointError,
        f"{misnamed} holds .* step 3: rename it to step_0+3",
        **changes,
        resume=True,
    )
    misnamed.rename(checkpoints / "step_000003")
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


def test_where_any_name_will_do_a_misnamed_checkpoint_is_called_half_a_one(tiny_run, monkeypatch):
    """Negative control."""
    tiny_run(**{"training.steps": 1})
    checkpoints = tiny_run.directory / "run" / "checkpoints"
    (checkpoints / "step_000001").rename(checkpoints / "step_9")
    monkeypatch.setattr(checkpoint, "checkpoint_name", lambda step: "step_9")
    with pytest.raises(RunDirectoryError, match="step_9 is no whole checkpoint"):
        tiny_run(**{"training.steps": 2}, resume=True)


def test_half_a_checkpoint_in_the_way_is_named_before_the_run_goes_on(tiny_run, finished):
    finished(**{"training.save_every": 1})
    newest = tiny_run.directory / "run" / "checkpoints" / "step_000003"
    (newest / "trainer.json").unlink()
    tiny_run.refused(
        RunDirectoryError,
        f"{newest} is no whole checkpoint",
        **{"training.save_every": 1},
        resume=True,
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize("step", [0, 1])
def test_a_disk_that_is_full_at_the_metrics_says_what_helps(tiny_run, monkeypatch, step, number):
    real = os.fsync

    def full(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("metrics.jsonl") and Path(name).stat().st_size > 0:
            logged.append(name)
            if len(logged) == 1 + 2 * step:
                raise OSError(number, os.strerror(number))
        real(descriptor)

    logged, changes = [], {"training.save_every": 1 if step else 0}
    remedy = "then resume the run" if step else "begin again with overwrite"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            RunDirectoryError, match=f"{os.strerror(number)}.*free some space.*{remedy}"
        ):
            tiny_run(**changes)
    _, rows = tiny_run(**changes, **{"resume" if step else "overwrite": True})
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_a_backup_of_hard_links_that_resumes_leaves_the_original_alone(tiny_run, lasting):
    given = {"training.steps": 3, "training.save_every": 1, "training.keep_checkpoints": 3}
    _, rows = tiny_run(**given)
    before = tiny_run.files()
    backup = tiny_run.directory / "backup"
    shutil.copytree(tiny_run.directory / "run", backup, copy_function=os.link)
    shutil.rmtree(backup / "checkpoints" / "step_000003")
    _, resumed = tiny_run.of_its_own("backup", **given, resume=True)
    assert lasting(resumed) == lasting(rows)
    assert tiny_run.files() == before
