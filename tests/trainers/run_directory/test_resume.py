import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from rl_consistency.numerics.strict import strict
from rl_consistency.trainers import run as run_module
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.run_directory import checkpoint
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.directory import RunDirectoryError
from rl_consistency.trainers.run_directory.step_files import StepFiles, read_metrics
from tests.trainers.algorithms.test_ppo import PPO

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def whole_run():
    """Summary and metrics of the run that others are interrupted in."""
    return {}


def uninterrupted(whole_run, tiny_run, lasting, lasting_summary):
    if not whole_run:
        summary, rows = tiny_run.of_its_own("whole", **tiny_run.LONG)
        whole_run |= {"summary": lasting_summary(summary), "rows": lasting(rows)}
        whole_run["digests"] = (tiny_run.directory / "whole" / "digests.jsonl").read_bytes()
    return whole_run["summary"], whole_run["rows"]


class Interrupt(BaseException):
    """Stops a run where it is, as a signal would."""


def interrupt(monkeypatch, place):
    """Make the next run stop at `place`, once."""
    where, step = place
    armed = [True]

    def stop_if(here):
        if here and armed:
            armed.clear()
            raise Interrupt

    log, save = StepFiles.log, run_module.save_checkpoint
    learn, write = GRPOTrainer._learn, checkpoint.save_file
    seen = {"rollouts": 0, "saving": None}

    def logging(self, at, metrics):
        stop_if(where == "before log" and at == step)
        log(self, at, metrics)
        stop_if(where == "after log" and at == step)

    def saving(directory, *, step: int, **given):
        seen["saving"] = step
        path = save(directory, step=step, **given)
        stop_if(where == "after save" and step == place[1])
        return path

    def writing(tensors, path, **given):
        write(tensors, path, **given)
        if where == "in save" and seen["saving"] == step:
            path.write_bytes(path.read_bytes()[:100])
            stop_if(True)

    def learning(self, experience):
        seen["rollouts"] += 1
        metrics = learn(self, experience)
        stop_if(where == "after learning" and seen["rollouts"] == step)
        return metrics

    monkeypatch.setattr(StepFiles, "log", logging)
    monkeypatch.setattr(run_module, "save_checkpoint", saving)
    monkeypatch.setattr(checkpoint, "save_file", writing)
    monkeypatch.setattr(GRPOTrainer, "_learn", learning)


PLACES = [
    ("after save", 0),
    ("after log", 2),
    ("after learning", 3),
    ("before log", 4),
    ("after save", 6),
]


@pytest.mark.parametrize(
    "place",
    [
        ("after log", 0),
        ("in save", 2),
        *(pytest.param(place, marks=pytest.mark.thorough) for place in PLACES),
    ],
    ids=lambda place: " ".join(map(str, place)),
)
def test_a_run_stopped_anywhere_and_resumed_ends_as_if_never_stopped(
    tiny_run, lasting, lasting_summary, monkeypatch, whole_run, place
):
    summary, rows = uninterrupted(whole_run, tiny_run, lasting, lasting_summary)
    with monkeypatch.context() as patched:
        interrupt(patched, place)
        with pytest.raises(Interrupt):
            tiny_run(**tiny_run.LONG)
    if place == ("after log", 0):  # nothing has been saved yet
        with pytest.raises(RunDirectoryError, match="no complete checkpoint to resume from"):
            tiny_run(**tiny_run.LONG, resume=True)
        return
    told = []
    resumed, resumed_rows = tiny_run(**tiny_run.LONG, resume=True, announce=told.append)
    assert "resumed from" in told[0] and not any("warm start" in line for line in told)
    assert lasting(resumed_rows) == rows
    assert lasting_summary(resumed) == summary
    assert tiny_run.files()["digests.jsonl"] == whole_run["digests"]


def test_resuming_without_a_checkpoint_is_refused(tiny_run, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt(patched, ("after log", 2))
        with pytest.raises(Interrupt):
            tiny_run()
    tiny_run.refused(
        RunDirectoryError, r"no complete checkpoint.*training\.save_every", resume=True
    )


def test_resuming_in_another_environment_is_refused_by_name(tiny_run, finished):
    finished(**{"training.save_every": 1})
    before = tiny_run.files()
    with (
        strict(except_={"attention"}),
        pytest.raises(CheckpointError, match="stock_ops: attention != none"),
    ):
        tiny_run(**{"training.save_every": 1}, resume=True)
    assert tiny_run.files() == before


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_resuming_from_a_truncated_checkpoint_is_refused_and_loses_nothing(tiny_run, lasting, file):
    changes = {"training.save_every": 1}
    _, rows = tiny_run(**changes)
    newest = tiny_run.directory / "run" / "checkpoints" / "step_000003"
    (newest / file).write_bytes((newest / file).read_bytes()[:-50])
    tiny_run.refused(CheckpointError, str(newest), **changes, resume=True)
    shutil.rmtree(newest)
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


@pytest.mark.parametrize("damage", ["missing", "truncated", "another"])
def test_resuming_with_another_kl_reference_is_refused(tiny_run, finished, damage):
    changes = {"training.save_every": 1, "algorithm.kl_coefficient": 0.1}
    finished(**changes)
    file = tiny_run.directory / "run" / "reference.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-50])
    else:
        newest = tiny_run.directory / "run" / "checkpoints" / "step_000003"
        checkpoint.save_file(load_file(newest / "model.safetensors"), file)
    with pytest.raises(CheckpointError, match=r"reference\.safetensors is missing, damaged or of"):
        tiny_run(**changes, resume=True)


SCRIPT = """
import os, signal, sys
from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory import checkpoint
from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.run_directory.step_files import StepFiles

log, save_file, saved = StepFiles.log, checkpoint.save_file, []

def log_and_die(self, step, metrics):
    log(self, step, metrics)
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

def save_half_and_die(tensors, path, **given):
    save_file(tensors, path, **given)
    if path.name == "optimizer.safetensors":
        saved.append(path)
        if len(saved) == 3:  # after those of steps 0 and 2
            os.truncate(path, 1000)
            os.kill(os.getpid(), signal.SIGKILL)

def killed(recipe, where, name, instead):
    if not (child := os.fork()):
        setattr(where, name, instead)
        run.train(load_config(recipe))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL

killed(sys.argv[1], StepFiles, "log", log_and_die)
killed(sys.argv[2], checkpoint, "save_file", save_half_and_die)
"""


@pytest.mark.thorough
def test_a_killed_process_is_resumed_by_another_as_if_never_killed(
    tiny_run, lasting, lasting_summary, whole_run
):
    summary, rows = uninterrupted(whole_run, tiny_run, lasting, lasting_summary)
    newest = {"in a step": 4, "in a save": 2}
    recipes, script = [], tiny_run.directory / "script.py"
    for name in newest:
        own = {"run.output_dir": str(tiny_run.directory / name)}
        recipes.append(tiny_run.directory / f"{name}.yaml")
        recipes[-1].write_text(yaml.safe_dump(tiny_run.tree(**tiny_run.LONG | own)))
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), str(tiny_run.directory)])
    done = subprocess.run(
        [sys.executable, script, *recipes],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, step in newest.items():
        directory = tiny_run.directory / name
        assert tiny_run.checkpoints(name)[-1] == f"step_{step:06d}", name
        assert not (directory / "summary.json").exists(), name
        assert len(read_metrics(directory / "metrics.jsonl")) > step, name
        own = {"run.output_dir": str(directory)}
        resumed, resumed_rows = tiny_run(**tiny_run.LONG | own, resume=True)
        assert lasting(resumed_rows) == rows, name
        assert lasting_summary(resumed) == summary, name


WITH_A_CRITIC = PPO | {
    "warm_start.steps": 2,
    "warm_start.batch_size": 4,
    "algorithm.ppo.critic_learning_rate": 3e-3,
    "optimizer.schedule": "cosine",
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"policy.dtype": "bfloat16", "optimizer.learning_rate": 1e-3},
        WITH_A_CRITIC,
        WITH_A_CRITIC | {"policy.dtype": "bfloat16"},
    ],
    ids=["bfloat16", "ppo", "ppo bfloat16"],
)
def test_a_low_precision_run_and_one_of_ppo_resume_too(
    tiny_run, lasting, lasting_summary, monkeypatch, changes
):
    changes = changes | {"training.steps": 4, "training.save_every": 2}
    summary, rows = tiny_run.of_its_own("whole", **changes)
    with monkeypatch.context() as patched:
        interrupt(patched, ("after log", 3))
        with pytest.raises(Interrupt):
            tiny_run(**changes)
    resumed, resumed_rows = tiny_run(**changes, resume=True)
    assert lasting(resumed_rows) == lasting(rows)
    assert lasting_summary(resumed) == lasting_summary(summary)
