"""Jobs of `verify` in several processes: errors, ends, and the memory they share."""

import signal
import time
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from rl_consistency.kernels.core import compile_ahead
from rl_consistency.verify import processes as verify_processes
from rl_consistency.verify.claims import Check
from rl_consistency.verify.processes import (
    Job,
    _begin_process,
    _next,
    _run_job,
    run_in_processes,
)
from rl_consistency.verify.run import jobs_of, run_checks
from rl_consistency.verify.targets import preset_targets
from tests.verify.killed import left_behind


def test_processes_give_what_one_gives_in_the_same_order(monkeypatch):
    monkeypatch.setattr(verify_processes, "ProcessPoolExecutor", AtOnce)
    checked = ("C1 glu", "C1 rotary", "C6 embedding", "C6 glu")
    jobs = [
        j for j in jobs_of(preset_targets("tiny-qwen3", [torch.bfloat16])) if j.scope in checked
    ]
    reported = []
    results = run_in_processes(jobs, 2, torch.device("cpu"), reported.append)
    own = [result for job in jobs for result in job.run(lambda result: None)]
    assert len(own) == len(checked)
    assert sorted(map(str, reported)) == sorted(map(str, results))
    assert [(r.key, r.scope, r.cases, r.mismatches) for r in results] == [
        (r.key, r.scope, r.cases, r.mismatches) for r in own
    ]


ENDLESS = """
import multiprocessing, os, signal, time, torch
from contextlib import nullcontext
from functools import partial
from rl_consistency.verify.claims import Check
from rl_consistency.verify.processes import Job, run_in_processes

def checks():
    body = lambda tally: tally.expect("fine", True)
    return nullcontext([Check(claim="C1", subject="", what="", scope="", body=body)])

def found(result):
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    endless = Job(scope="x", memory=1, open=partial(time.sleep, 600))
    run_in_processes([endless, Job(scope="y", open=checks)], 2, torch.device("cpu"), found)
"""


@pytest.mark.thorough
def test_processes_end_with_the_one_that_began_them(tmp_path):
    """A pool's workers would wait for work for ever if theirs were killed."""
    assert left_behind(ENDLESS, tmp_path) == []


def test_an_error_in_another_process_is_raised_here_and_ends_what_still_runs():
    endless = Job(scope="x", memory=1, open=partial(time.sleep, 600))
    failing = Job(scope="y", open=partial(int, "no number"))
    began = time.monotonic()
    with pytest.raises(ValueError, match="no number"):
        run_in_processes([failing, endless], 2, torch.device("cpu"), lambda result: None)
    assert time.monotonic() - began < 300


class NoReturn(Exception):
    """Is sent, and cannot be made again from what arrives."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


class NoSending(Exception):
    """Holds what no other process can have."""


@pytest.mark.parametrize(
    "error", [NoReturn("broken", "here"), NoSending("broken at here", lambda: None)]
)
def test_an_error_that_cannot_be_sent_arrives_as_text(error):
    def refuse():
        raise error

    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*in refuse.*broken at here"):
        _run_job(Job(scope="x", open=refuse))


def test_a_process_takes_the_current_device_and_dies_of_an_interrupt(monkeypatch):
    found = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(verify_processes, "end_with_parent", lambda: None)
    monkeypatch.setattr(compile_ahead, "_workers", 1)
    try:
        _begin_process(torch.device("cuda"), torch.get_num_threads(), 5)
        assert compile_ahead._workers == 5
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, found)


class AtOnce:
    """In place of the pool: a job is run when it is submitted."""

    def __init__(self, *given):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def shutdown(self, cancel_futures):
        pass

    def submit(self, run, job):
        future = Future()
        try:
            future.set_result(run(job))
        except torch.OutOfMemoryError as error:
            future.set_exception(error)
        return future


def test_checks_of_no_model_can_be_shared_too(monkeypatch):
    reported = []
    alone = run_checks([], on_result=reported.append)
    assert reported == alone and [(r.scope, r.passed) for r in alone] == [("process", True)] * 2
    monkeypatch.setattr(verify_processes, "ProcessPoolExecutor", AtOnce)
    assert [r.key for r in run_checks([], processes=2)] == [r.key for r in alone]


def short_of_memory(times):
    """A job whose check finds no memory so many times."""
    tries = []

    def body(tally):
        tries.append(len(tries))
        if len(tries) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        tally.expect("fine", True)

    def opened():
        return nullcontext([Check(claim="C1", subject="x", what="y", scope="fp32", body=body)])

    return Job(scope="x", memory=1, open=opened), tries


def test_a_job_that_found_no_memory_runs_again_alone(monkeypatch):
    monkeypatch.setattr(verify_processes, "ProcessPoolExecutor", AtOnce)
    short, tries = short_of_memory(1)
    other, _ = short_of_memory(0)
    results = run_in_processes([short, other], 2, torch.device("cpu"), lambda result: None)
    assert [r.passed for r in results] == [True, True] and len(tries) == 2
    never, tries = short_of_memory(9)
    with pytest.raises(torch.OutOfMemoryError):
        run_in_processes([never, other], 2, torch.device("cpu"), lambda result: None)
    assert len(tries) == 2


def begun(sizes, running=()):
    """Of the jobs of these sizes, those that 4 processes begin in a memory of 10."""
    waiting = [i for i in range(len(sizes)) if i not in running]
    return _next(sizes, waiting, running, 10, 4)


def test_jobs_begin_as_long_as_the_memory_holds_them():
    assert begun([4, 4, 4, 1]) == [0, 1, 3]
    assert begun([4, 4, 4, 1], running=(0, 1)) == [3]
    assert begun([1] * 9) == [0, 1, 2, 3]
    assert begun([1] * 9, running=(0, 1, 2, 3)) == []


def test_a_job_larger_than_the_memory_runs_alone():
    assert begun([50, 1, 1]) == [0]
    assert begun([50, 1, 1], running=(1,)) == [2]
    assert begun([50, 1, 1], running=(0,)) == []
