"""A reward function changes nothing of the process that trains, and does not train on in a fork."""

import contextlib
import io
import os
import sys

import pytest
import torch

from rl_consistency.trainers import foreign_calls
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.foreign_calls import LeftChanged, guarded
from rl_consistency.trainers.reward_functions import RewardError, resolve
from rl_consistency.trainers.rewards import RewardFunction, compute_rewards

EXAMPLES = [Example(id=0, prompt="p", answer="a", target="a")]


def score(action):
    def mine(**given):
        action()
        return [1.0]

    return compute_rewards([RewardFunction("mine:f", mine)], EXAMPLES, ["c"]).total


def state():
    return [setting.read() for setting in foreign_calls._SETTINGS]


def enter_inference_mode():
    entered.append(torch.inference_mode())
    entered[-1].__enter__()


entered = []
LEFT = {
    "inference mode on": enter_inference_mode,
    "another default dtype": lambda: torch.set_default_dtype(torch.float64),
    "another default device": lambda: torch.set_default_device("meta"),
    "another number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "another umask": lambda: os.umask(0o777),
    "standard input or output closed": lambda: os.close(1),
    "sys.stdin, stdout or stderr replaced": lambda: setattr(sys, "stdout", io.StringIO()),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_function_leaves_changed_is_put_back_and_named(what, capfd):
    before, output = state(), os.dup(1)
    try:
        with pytest.raises(RewardError, match=f"^reward function 'mine:f' leaves {what}: put it"):
            score(LEFT[what])
        assert state() == before and torch.ones(1, requires_grad=True).mul(2).requires_grad
    finally:
        os.dup2(output, 1)
        os.close(output)


@pytest.mark.parametrize("what", [what for what in LEFT if "closed" not in what])
def test_where_a_function_raises_its_error_is_told_and_all_is_put_back(what):
    def both():
        LEFT[what]()
        raise RuntimeError("no judge at home")

    before = state()
    with pytest.raises(RewardError, match="no judge at home"):
        score(both)
    assert state() == before


def test_what_a_function_puts_back_itself_is_its_own():
    def orderly():
        with torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
            torch.set_default_dtype(torch.float64)
            torch.set_default_dtype(torch.float32)

    assert score(orderly) == [1.0]


@pytest.mark.parametrize("on", [True, False])
def test_gradients_are_on_or_off_as_before(on):
    with torch.set_grad_enabled(on):
        score(lambda: torch.set_grad_enabled(not on))
        assert torch.is_grad_enabled() == on


def test_a_module_that_leaves_something_changed_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaves_a_dtype.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\nf = print\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match="'leaves_a_dtype': LeftChanged: leaves another default"):
        resolve("leaves_a_dtype:f")
    assert torch.get_default_dtype() == torch.float32


def test_without_the_guard_a_change_stays(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(foreign_calls, "_SETTINGS", ())
    try:
        assert score(lambda: torch.set_default_dtype(torch.float64)) == [1.0]
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def nothing():
    pass


def fails():
    raise RuntimeError("in the fork")


@pytest.mark.parametrize("then", [nothing, fails, sys.exit, lambda: sys.exit(0)])
def test_a_forked_process_that_comes_back_is_ended(then, capfd):
    ended = []

    def forks():
        if child := os.fork():
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            then()

    assert score(forks) == [1.0] and ended == [foreign_calls.STRAY]
    assert f"forked by a function that process {os.getpid()} called" in capfd.readouterr().err


def test_a_forked_process_that_ends_by_itself_is_left_alone(capfd):
    def forks():
        if not (child := os.fork()):
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    assert score(forks) == [1.0] and capfd.readouterr().err == ""


def test_a_guard_inside_a_guard_names_the_inner_change():
    with guarded(), pytest.raises(LeftChanged, match="umask"), guarded():
        os.umask(0o777)
