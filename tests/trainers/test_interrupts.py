"""A signal that others' code swallows still ends the run."""

import errno
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
import yaml

from rl_consistency.cli.main import main
from rl_consistency.distributed.world import World
from rl_consistency.trainers import interrupts, rewards, run
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.interrupts import Ending, interrupts_heard
from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.reward_functions import resolve
from rl_consistency.trainers.rewards import RewardFunction, compute_rewards
from rl_consistency.trainers.run_directory.step_files import read_metrics

EXAMPLE = Example(id=1, prompt="1+1=", answer="2", target="2")


def swallowing(completions, **_):
    with suppress(BaseException):
        signal.raise_signal(signal.SIGINT)
    return [0.0] * len(completions)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_handler_raised_is_raised_at_the_end_of_the_block(number):
    def end(number, frame):
        raise KeyboardInterrupt(number)

    before = signal.signal(number, end)
    try:
        match = str(int(number))
        with (
            pytest.raises(KeyboardInterrupt, match=match),
            interrupts_heard(),
            suppress(BaseException),
        ):
            signal.raise_signal(number)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_an_interrupt_that_a_reward_function_swallows_passes_through():
    with pytest.raises(KeyboardInterrupt):
        compute_rewards([RewardFunction("mine", swallowing)], [EXAMPLE], ["2"])


def test_unheard_a_swallowed_interrupt_is_lost(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(rewards, "interrupts_heard", nullcontext)
    assert compute_rewards([RewardFunction("mine", swallowing)], [EXAMPLE], ["2"]).total == [0.0]


def test_an_interrupt_that_a_module_swallows_as_it_is_imported_passes_through(
    tmp_path, monkeypatch
):
    (tmp_path / "swallowing_module.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept:\n    pass\n"
        "def mine(**_): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        resolve("swallowing_module:mine")


def test_another_thread_is_let_be():
    def block():
        with interrupts_heard():
            return 1

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(block).result() == 1


SIGNALLED = """
def signalled(completions, **_):
    import os, signal, time
    global calls
    calls = globals().get("calls", 0) + 1
    for _ in range({times} if calls == 2 else 0):
        try:
            os.kill(os.getpid(), signal.{name})
            time.sleep(1.1)
        except:
            pass
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


@pytest.fixture
def signalled(tiny_run):
    """The arguments of a run whose reward function sends signals in the second step."""
    reward = {"reward.functions": [{"name": "toy_rewards:signalled"}]}
    recipe = tiny_run.directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_run.tree(**reward)))

    def arguments(name, times=1):
        module = tiny_run.directory / "toy_rewards.py"
        module.write_text(SIGNALLED.format(name=name, times=times))
        return ["train", str(recipe), "--set", "run.seed=4"]

    return arguments


@pytest.mark.thorough
def test_a_signal_ends_a_run_after_a_checkpoint_and_the_command_that_continues_it(
    signalled, tiny_run
):
    # SIGTERM's way out: tests/cli/test_train.py
    command = [sys.executable, "-m", "rl_consistency", *signalled("SIGINT")]
    given = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=tiny_run.directory, **given)
    told = "SIGINT: finishing and saving this step; again: end now\n"
    assert (done.returncode, done.stderr) == (130, f"{told}error: interrupted\n")
    assert tiny_run.checkpoints() == ["step_000002"]
    command = shlex.split(done.stdout.splitlines()[-1])
    recipe = str(tiny_run.directory / "recipe.yaml")
    assert command == ["rl-consistency", "train", recipe, "--set", "run.seed=4", "--resume"]
    metrics = read_metrics(tiny_run.directory / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]


def test_a_run_that_a_signal_ended_continues_as_if_it_had_not(tiny_run, lasting):
    changes = tiny_run.LONG | {"training.save_every": 0}
    _, rows = tiny_run.of_its_own("whole", **changes)
    step, calls = run._Run.step, []

    def interrupted(self, number):
        metrics = step(self, number)
        calls.append(number)
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        return metrics

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run._Run, "step", interrupted)
        tiny_run(**changes)
    assert calls == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


@pytest.mark.parametrize("ends", [False, True])
def test_a_run_without_checkpoints_writes_one_only_when_a_signal_ends_it(tiny_run, ends):
    def interrupted(self, number):
        if ends:
            signal.raise_signal(signal.SIGINT)
        return step(self, number)

    step, outcome = run._Run.step, pytest.raises(KeyboardInterrupt) if ends else nullcontext()
    with pytest.MonkeyPatch.context() as patched, outcome:
        patched.setattr(run._Run, "step", interrupted)
        changed = tiny_run.tree()["training"] | {"steps": 2, "save_every": None}
        tiny_run(training=changed)
    assert tiny_run.checkpoints() == ["step_000001"] * ends
    if ends:  # what continues it does not leave the newest checkpoint behind its last step
        tiny_run(training=changed, resume=True)
        assert tiny_run.checkpoints()[-1] == "step_000002"


def test_a_second_signal_ends_a_run_at_once(signalled, tiny_run, capfd):
    assert main(signalled("SIGTERM", times=2)) == 143
    shown = capfd.readouterr()
    assert "SIGTERM: finishing" in shown.err and "To continue" not in shown.out
    assert tiny_run.checkpoints() == []


def test_a_signal_that_a_launcher_repeats_is_one():
    progress, told = Progress(1), []
    with Ending(progress, speaks=True) as ending:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        progress.listener = told.append
        progress.tell("training")
        notice = "SIGINT: finishing and saving this step; again: end now"
        assert told == [f"step 0/1: training, {notice}"]
        assert ending.asked(World(range(1), 0, device=torch.device("cpu"))) == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_heard_where_standard_error_takes_nothing(monkeypatch):
    """As when a terminal closes, which is why SIGHUP comes."""

    def gone(descriptor, text):
        raise OSError(errno.EIO, "Input/output error")

    with Ending(Progress(1), speaks=True) as ending:
        monkeypatch.setattr(interrupts.os, "write", gone)
        signal.raise_signal(signal.SIGINT)
        assert ending.asked(World(range(1), 0, device=torch.device("cpu"))) == signal.SIGINT
