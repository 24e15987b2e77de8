"""A child process that answers requests: its answers, its failures, its end."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rollout import child as processes
from benchmarks.rollout.child import Budget, Child, ChildError, last_error, last_line, tail

STAND_IN = Path(__file__).with_name("stand_in.py")
REQUEST = {"prompts": [[5, 6]], "new_tokens": 2, "temperature": 0.0, "keep": True}


def started(folder, fault="none"):
    command = [sys.executable, str(STAND_IN), "0.5", fault, str(folder)]
    return Child(command, folder, folder / "log")


def test_requests_are_answered_in_their_order_whatever_is_printed(tmp_path):
    with started(tmp_path) as child:
        assert child.ready(10) == {"seconds": 0.1, "version": "9.9"}
        assert child.ask(REQUEST, 10) == {"seconds": 0.5, "completions": [[[5, 5], [-1.5, -1.5]]]}
        other = REQUEST | {"prompts": [[9]], "new_tokens": 1}
        assert child.ask(other, 10)["completions"] == [[[9], [-1.5]]]
    assert tail(tmp_path / "log") == 'garbage {"seconds": on standard output'


def test_a_child_that_cannot_start_gives_the_cause_and_what_came_of_it(tmp_path):
    with started(tmp_path, "start") as child, pytest.raises(ChildError) as caught:
        child.ready(10)
    assert str(caught.value) == (
        "it ended with status 1: ImportError: no module named _C ... "
        "RuntimeError: the engine's core did not start"
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "it ended with status 3: torch.OutOfMemoryError: CUDA out of memory"),
        ("hangs", "no answer in 0 s; its last line: still compiling"),
        ("garbage", r"it answered '\[1, 2', not JSON with `seconds`"),
    ],
)
def test_a_fault_is_one_message_and_comes_in_time(tmp_path, fault, message):
    began = time.perf_counter()
    with started(tmp_path, fault) as child:
        child.ready(10)
        for _ in range(3):
            child.ask(REQUEST, 10)
        with pytest.raises(ChildError, match=message):
            child.ask(REQUEST, 0.3 if fault == "hangs" else 10)
    assert time.perf_counter() - began < 10


def test_a_child_that_has_died_is_asked_in_vain(tmp_path):
    with started(tmp_path, "dies") as child:
        child.ready(10)
        for _ in range(3):
            child.ask(REQUEST, 10)
        for _ in range(2):
            with pytest.raises(ChildError, match="it ended with status 3"):
                child.ask(REQUEST, 10)


def test_the_end_takes_the_processes_of_a_child_along(tmp_path):
    script = (
        "import os, subprocess, sys, time; from pathlib import Path\n"
        "found = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"part = Path({str(tmp_path)!r}, 'part')\n"
        "part.write_text('{\"seconds\": %d}' % found.pid)\n"
        f"os.replace(part, Path({str(tmp_path)!r}, 'ready.answer.json'))\n"
        "time.sleep(60)\n"
    )
    with Child([sys.executable, "-c", script], tmp_path, tmp_path / "log") as child:
        pid = child.ready(10)["seconds"]
        os.kill(pid, 0)
    until = time.perf_counter() + 10
    while _lives(pid):
        assert time.perf_counter() < until, "the process of the child lives on"
        time.sleep(0.01)


def _lives(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_what_a_log_says_last(tmp_path):
    log = tmp_path / "log"
    assert last_line(log) == last_error(log) == "(nothing printed)"
    log.write_text("one\n  two  \n\n", "utf-8")
    assert last_line(log) == last_error(log) == "two"
    log.write_text('  File "a.py", in ValueError: x\nraise KeyError: y\nend\n', "utf-8")
    assert last_error(log) == "end"
    log.write_bytes(b"\xff broken\nKeyError: " + b"x" * 500)
    assert last_error(log) == ("KeyError: " + "x" * 500)[: processes.LONGEST_LINE]


def test_a_budget_shortens_limits_and_ends(monkeypatch):
    assert Budget().within(240.0) == 240.0
    now = [0.0]
    monkeypatch.setattr(processes.time, "perf_counter", lambda: now[0])
    budget = Budget(100.0)
    assert (budget.within(60.0), budget.within(240.0)) == (60.0, 100.0)
    now[0] = 90.0
    assert budget.within(60.0) == 10.0
    now[0] = 100.0
    with pytest.raises(ChildError, match="the 100 s of --seconds are over"):
        budget.within(60.0)
