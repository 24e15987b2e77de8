"""One run directory, one process."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from contextlib import nullcontext

import pytest

from rl_consistency.trainers import run as run_module
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.directory import RunDirectoryError, locked
from rl_consistency.trainers.run_directory.step_files import StepFiles

SAVING = {"training.steps": 3, "training.save_every": 1}


def second(tiny_run, monkeypatch, **modes):
    """What a second run in the same directory meets, begun in the middle of a first one."""
    met, log = [], StepFiles.log

    def and_another(self, step, metrics):
        log(self, step, metrics)
        if step == 2 and not met:
            met.append(None)
            before = tiny_run.files()
            with pytest.raises(RunDirectoryError) as error:
                tiny_run(**SAVING, **modes)
            met[0] = str(error.value)
            assert tiny_run.files() == before

    monkeypatch.setattr(StepFiles, "log", and_another)
    return met


@pytest.mark.parametrize(("mode", "first"), [("resume", 0), ("overwrite", 0), ("resume", 1)])
def test_a_second_run_in_the_directory_of_a_running_one_is_refused(
    tiny_run, lasting, monkeypatch, mode, first
):
    """Also where the running one was resumed itself."""
    _, rows = tiny_run.of_its_own("whole", **SAVING)
    if first:
        tiny_run(**SAVING | {"training.steps": first})
    met = second(tiny_run, monkeypatch, **{mode: True})
    _, mine = tiny_run(**SAVING, resume=first > 0)
    assert "another process" in met[0] and str(tiny_run.directory / "run") in met[0]
    assert lasting(mine) == lasting(rows)


def test_without_the_lock_two_runs_write_the_same_checkpoint(tiny_run, monkeypatch):
    """Negative control."""
    changes, begun, log = {"training.steps": 4, "training.save_every": 2}, [], StepFiles.log

    def and_another(self, step, metrics):
        log(self, step, metrics)
        if step == 3 and not begun:
            begun.append(step)
            tiny_run(**changes, resume=True)

    monkeypatch.setattr(StepFiles, "log", and_another)
    monkeypatch.setattr(run_module, "locked", nullcontext)
    with pytest.raises(CheckpointError, match="step_000004.*not empty"):
        tiny_run(**changes)


def test_a_file_system_without_locks_is_refused(tiny_run, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(RunDirectoryError, match="cannot be locked .No locks available"):
        tiny_run(**SAVING)


def test_a_run_begun_while_another_begins_is_refused(tiny_run, monkeypatch):
    real = run_module.open_directory

    def both(config, **given):
        monkeypatch.setattr(run_module, "open_directory", real)
        tiny_run(**SAVING)  # the other run is begun and ended in between
        real(config, **given)

    monkeypatch.setattr(run_module, "open_directory", both)
    with pytest.raises(RunDirectoryError, match="another process|already holds a run"):
        tiny_run(**SAVING)


def test_a_link_in_the_place_of_the_lock_is_refused(tiny_run):
    tiny_run(**SAVING)
    directory = tiny_run.directory / "run"
    target = tiny_run.directory / "precious"
    (directory / ".rl_consistency.lock").unlink()
    (directory / ".rl_consistency.lock").symlink_to(target)
    with pytest.raises(RunDirectoryError, match=r"\.rl_consistency\.lock"):
        tiny_run(**SAVING, resume=True)
    assert not target.exists()


@pytest.mark.thorough
def test_a_kill_releases_the_lock(tiny_run):
    fork = multiprocessing.get_context("fork")
    stands, log = fork.Event(), StepFiles.log

    def log_and_wait(self, step, metrics):
        log(self, step, metrics)
        if step == 2:
            stands.set()
            signal.pause()

    def run():
        StepFiles.log = log_and_wait
        tiny_run(**SAVING)

    process = fork.Process(target=run)
    process.start()
    try:
        assert stands.wait(60)
        with pytest.raises(RunDirectoryError, match="another process"):
            tiny_run(**SAVING, resume=True)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    summary, _ = tiny_run(**SAVING, resume=True)
    assert summary["steps"] == 3


@pytest.mark.thorough
def test_a_forked_process_that_outlives_a_killed_run_does_not_hold_the_lock(tmp_path):
    fork = multiprocessing.get_context("fork")
    pids = fork.SimpleQueue()

    def run():
        with locked(tmp_path):
            if not (child := os.fork()):
                time.sleep(60)
                os._exit(0)
            pids.put(child)
            time.sleep(60)

    process = fork.Process(target=run)
    process.start()
    child = pids.get()
    try:
        with pytest.raises(RunDirectoryError, match="another process"), locked(tmp_path):
            pass
        process.kill()
        process.join()
        with locked(tmp_path):
            os.kill(child, 0)  # it lives on
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.join()


def test_a_forked_process_does_not_release_the_lock_of_its_parent(tmp_path):
    with locked(tmp_path):
        if not (child := os.fork()):
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(RunDirectoryError, match="another process"), locked(tmp_path):
            pass
