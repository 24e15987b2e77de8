"""A process that ends without having come to its end does not pass for one that has."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import ctypes, os, signal, sys, threading, time
from rl_consistency.cli.watched import watched

def block():
    {body}
    return 0

with watched():
    status = block()
sys.exit(status)
"""


def started(body, **options):
    text = SCRIPT.format(body=body.replace("; ", "\n    "))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", text], env=environment, **options)


def ends(body):
    process = started(body)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(
    "body",
    [
        "os._exit(0)",
        "os._exit(5)",
        "os.execvp('true', ['true'])",
        "ctypes.CDLL(None).exit(0)",
        "ctypes.CDLL(None)._exit(0)",
        "threading.Thread(target=lambda: os._exit(0)).start(); time.sleep(60)",
        "os.fork() or time.sleep(2); os._exit(0)",
    ],
)
def test_an_end_without_a_word_has_a_status_and_a_message(body):
    status, said = ends(body)
    assert status == 2 and said.startswith("error: the process of this command ended with status ")


@pytest.mark.parametrize(
    ("body", "status"), [("pass", 0), ("return 1", 1), ("sys.exit(3)", 3), ("1 / 0", 1)]
)
def test_an_end_of_its_own_is_handed_on(body, status):
    found, said = ends(body)
    assert found == status and "before its end" not in said


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_process_that_a_signal_killed_is_one_that_a_signal_killed(name):
    assert ends(f"os.kill(os.getpid(), signal.{name})")[0] == -signal.Signals[name]


HEARS = "signal.signal({0}, lambda *_: os._exit(7)); print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_is_handed_on(name):
    process = started(HEARS.format(f"signal.{name}"))
    assert int(process.stdout.readline()) != process.pid
    process.send_signal(signal.Signals[name])
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "ended with status 7" in said


def test_a_killed_parent_takes_the_process_with_it():
    process = started("print(os.getpid(), flush=True); time.sleep(60)")
    child = Path(f"/proc/{int(process.stdout.readline())}")
    process.kill()
    process.wait()
    for _ in range(100):
        if not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2][:3]:
            return
        time.sleep(0.05)
    pytest.fail("it lives on")


def test_a_command_that_is_not_watched_ends_with_status_0():
    """Negative control."""
    assert subprocess.run([sys.executable, "-c", "import os; os._exit(0)"]).returncode == 0
