"""Work in forked children: who does it, and what is left where they fail."""

import gc
import os
import time

import pytest

from rl_consistency.kernels.core import child_processes as module
from rl_consistency.kernels.core.child_processes import finished_in_children


def children_of_this_process():
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += file.read().split()
    return found


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def test_each_work_is_done_once_by_several_children(tmp_path):
    def work(n):
        time.sleep(0.02)
        with open(tmp_path / str(n), "a") as file:
            file.write(f"{os.getpid()} {gc.isenabled()}\n")

    opened = descriptors()
    assert sorted(finished_in_children(work, 12, 3)) == list(range(12))
    lines = [(tmp_path / str(n)).read_text().split() for n in range(12)]
    assert all(len(line) == 2 for line in lines)
    pids = {pid for pid, _ in lines}
    assert str(os.getpid()) not in pids and 1 < len(pids) <= 3
    assert {collects for _, collects in lines} == {"False"}
    assert descriptors() == opened and not children_of_this_process()


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
    assert time.perf_counter() - began < 10 and not children_of_this_process()


def test_who_stops_asking_leaves_no_child():
    opened = descriptors()
    found = finished_in_children(lambda n: time.sleep(0.01 if n == 0 else 60), 4, 2)
    assert next(found) == 0
    found.close()
    assert not children_of_this_process() and descriptors() == opened


def test_where_no_process_can_be_made_nothing_finishes(monkeypatch):
    def refuse():
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", refuse)
    opened = descriptors()
    assert list(finished_in_children(lambda n: None, 4, 2)) == []
    assert descriptors() == opened


def test_works_beyond_the_pipe_are_left(monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    assert sorted(finished_in_children(lambda n: None, 5, 2)) == [0, 1]
