"""Work in forked children: who does it, and what is left where they fail."""

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest

from rl_consistency.kernels.core import child_processes as module
from rl_consistency.kernels.core.child_processes import finished_in_children


def children_of_this_process():
    found = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as file:
            found |= set(file.read().split())
    return found


def open_files():
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return {pair for pair in found.items() if pair[1].startswith(("pipe:", "anon_inode:[pidfd"))}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No child, pipe or descriptor of a process; other tests of this process may have some."""
    before = children_of_this_process(), open_files()
    yield
    assert children_of_this_process() <= before[0] and open_files() <= before[1]


def test_each_work_is_done_once_by_several_children(tmp_path):
    def work(n):
        time.sleep(0.02)
        with open(tmp_path / str(n), "a") as file:
            file.write(f"{os.getpid()} {gc.isenabled()}\n")

    assert sorted(finished_in_children(work, 12, 3)) == list(range(12))
    lines = [(tmp_path / str(n)).read_text().split() for n in range(12)]
    assert all(len(line) == 2 for line in lines)
    pids = {pid for pid, _ in lines}
    assert str(os.getpid()) not in pids and 1 < len(pids) <= 3
    assert {collects for _, collects in lines} == {"False"}


def test_a_child_ends_at_its_first_error_and_the_others_go_on():
    def work(n):
        if n == 1:
            raise ValueError("no")
        time.sleep(0.01)

    assert sorted(finished_in_children(work, 8, 2)) == [0, *range(2, 8)]


def test_all_children_failing_leaves_the_work_to_the_caller():
    assert list(finished_in_children(lambda n: 1 / 0, 8, 2)) == []


def test_a_child_that_waits_for_ever_is_ended_with_a_warning():
    def work(n):
        time.sleep(60 if n else 0)

    began = time.perf_counter()
    with pytest.warns(UserWarning, match="none of 2 child processes has finished"):
        assert list(finished_in_children(work, 3, 2, patience=0.5)) == [0]
    assert time.perf_counter() - began < 10


def test_who_stops_asking_leaves_no_child():
    found = finished_in_children(lambda n: time.sleep(0.01 if n == 0 else 60), 4, 2)
    assert next(found) == 0
    found.close()


@pytest.mark.parametrize("name", ["fork", "pidfd_open", "pipe"])
def test_where_the_system_allows_no_process_nothing_finishes(name, monkeypatch):
    def refuse(*_):
        raise BlockingIOError("too many of them")

    monkeypatch.setattr(os, name, refuse)
    found = list(finished_in_children(lambda n: None, 4, 2))
    # A child of which no descriptor can be had may have worked before it was ended.
    assert not found or name == "pidfd_open"


def reap_all(*_):
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap_all], ids=["ignored", "reaped"])
def test_a_program_that_waits_for_children_itself_loses_no_work(handler):
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert sorted(finished_in_children(lambda n: time.sleep(0.01), 6, 3)) == list(range(6))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_descriptors_beyond_a_thousand_are_polled():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert sorted(finished_in_children(lambda n: None, 4, 2)) == list(range(4))


def test_handlers_and_prints_of_the_parent_are_not_those_of_a_child(tmp_path, capfd):
    """A handler that saves a checkpoint must not run in every child."""

    def save(*_):
        (tmp_path / f"checkpoint {os.getpid()}").touch()

    def work(n):
        print("a child's")
        (tmp_path / str(n)).write_text(str(signal.getsignal(signal.SIGTERM)))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, save)
    try:
        assert list(finished_in_children(work, 2, 2)) == []
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        str(n): str(signal.SIG_DFL) for n in range(2)
    }
    assert capfd.readouterr() == ("", "")


CALLER = """
import sys, time
from rl_consistency.kernels.core import child_processes
from rl_consistency.kernels.core.child_processes import finished_in_children

child_processes._PR_SET_PDEATHSIG = int(sys.argv[2])

def work(n):
    open(sys.argv[1] + f"/{n}", "w").close()
    time.sleep(30)

list(finished_in_children(work, 8, 2))
"""


def ended_caller(how, folder, asked=1):
    """A program that was ended while two children worked: the end of a pipe that they hold too,
    which stands for a GPU, a port or `| tee`, and their ids."""
    read, held = os.pipe()
    command = [sys.executable, "-c", CALLER, str(folder), str(asked)]
    caller = subprocess.Popen(command, pass_fds=[held], stderr=subprocess.DEVNULL)
    os.close(held)
    while len(list(folder.iterdir())) < 2:
        assert caller.poll() is None
        time.sleep(0.02)
    with open(f"/proc/{caller.pid}/task/{caller.pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    caller.send_signal(how)
    caller.wait()
    return read, children


def is_let_go(read, seconds):
    """Whether the other end of a pipe is closed within so many seconds."""
    return bool(select.select([read], [], [], seconds)[0])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_end_with_their_parent(how, tmp_path):
    read, _ = ended_caller(how, tmp_path)
    assert is_let_go(read, 5) and len(list(tmp_path.iterdir())) == 2
    os.close(read)


def test_children_that_do_not_ask_for_it_outlive_their_parent(tmp_path):
    """Negative control."""
    read, children = ended_caller(signal.SIGKILL, tmp_path, asked=0)
    assert not is_let_go(read, 0.5)
    for child in children:
        os.kill(child, signal.SIGKILL)
    assert is_let_go(read, 5)
    os.close(read)


def test_an_interrupt_while_children_start_loses_none(monkeypatch):
    """It waits until the child is in the list."""
    real = os.fork

    def fork():
        child = real()
        os.kill(os.getpid(), signal.SIGINT)  # in the parent, and in the child
        return child

    monkeypatch.setattr(os, "fork", fork)
    main = os.getpid()
    with pytest.raises(KeyboardInterrupt):
        list(finished_in_children(lambda n: time.sleep(9), 4, 2))
    assert os.getpid() == main


def test_works_beyond_the_pipe_are_left(monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    assert sorted(finished_in_children(lambda n: None, 5, 2)) == [0, 1]
