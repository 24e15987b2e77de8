"""A signal that others' code swallows still ends the run."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import yaml

from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.interrupts import interrupts_heard
from rl_consistency.trainers.rewards import compute
from rl_consistency.trainers.rewards.compute import compute_rewards
from rl_consistency.trainers.rewards.function import RewardFunction, resolve

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
    monkeypatch.setattr(compute, "interrupts_heard", nullcontext)
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


def test_a_run_ends_by_a_signal_that_its_reward_function_swallows(tiny_run):
    with (tiny_run.directory / "toy_rewards.py").open("a") as stream:
        stream.write(
            "def swallowing(completions, **_):\n    import os, signal, time\n    try:\n"
            "        os.kill(os.getpid(), signal.SIGTERM)\n        time.sleep(1)\n"
            "    except:\n        pass\n    return [0.0] * len(completions)\n"
        )
    recipe = tiny_run.directory / "recipe.yaml"
    reward = {"reward.functions": [{"name": "toy_rewards:swallowing"}]}
    recipe.write_text(yaml.safe_dump(tiny_run.tree(**reward)))
    command = [sys.executable, "-m", "rl_consistency", "train", str(recipe)]
    done = subprocess.run(command, cwd=tiny_run.directory, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (143, b"error: ended by SIGTERM\n")
