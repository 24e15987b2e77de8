"""The hash table's negative controls, and processes that end before their work does."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from rl_consistency.verify.mutants.world import WORLD_MUTANTS
from rl_consistency.verify.world import processes
from rl_consistency.verify.world.cells import Cell, control_cells, judge
from rl_consistency.verify.world.processes import run_cells

OTHER_SUMS = {
    *("reduce-scatter", "contiguous leaves", "ranks backwards", "bf16 buckets"),
    *("unsynchronised rank", "leaves tied to ranks"),
}
"""test_ordered_sum.py has them too, for less; `verify --world --mutants` runs all."""


@pytest.mark.thorough
def test_mutants_turn_the_table_red():
    names = {mutant.name for mutant in WORLD_MUTANTS}
    wanted = names - OTHER_SUMS
    assert names > OTHER_SUMS
    cells = [
        cell
        for cell in control_cells((1, 2))
        if cell.strategy == "replicated" and cell.mutant not in OTHER_SUMS
    ]
    found, controls = judge(run_cells(cells, steps=1, on_outcome=lambda outcome: None))
    assert {result.mutant.name for result in found if result.killed} == wanted
    assert [(r.subject, r.passed) for r in controls] == [("replicated", True)]


def test_a_run_whose_process_ends_is_an_error_and_the_others_go_on():
    def kill_the_next(outcome):
        seen.append(outcome)
        if len(seen) == 1:
            os.kill(max(child.pid for child in active_children()), signal.SIGKILL)

    cell = {"dtype": "float32", "strategy": "replicated", "micro_batch": 4, "world_size": 2}
    programs = ["", "", "no such mutant", ""]
    seen = []
    given = [Cell(**cell, mutant=mutant) for mutant in programs]
    first, killed, raised, last = run_cells(given, steps=1, on_outcome=kill_the_next)
    assert first.digest == last.digest and not first.failure and not last.failure
    assert killed.failure == "process 1 terminated with signal SIGKILL"
    assert raised.failure == "KeyError: 'no such mutant'"
    assert seen == [first, killed, raised, last] and not active_children()


KILLED = """
import os, signal
from multiprocessing import active_children
from rl_consistency.verify.world.cells import Cell
from rl_consistency.verify.world.processes import run_cells

def end(outcome):
    print(*(child.pid for child in active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

cell = Cell(dtype="float32", strategy="replicated", micro_batch=4, world_size=2)
run_cells([cell] * 50, steps=1, on_outcome=end)
"""


def is_running(pid):
    """Whether a process is there and not just waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.thorough
def test_processes_of_a_table_end_with_the_program_that_was_killed(tmp_path):
    """They would train what is left of the table, and hold their GPUs."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    # To a file: a pipe would stay open for as long as a process that was left behind.
    with (tmp_path / "pids").open("w") as file:
        killed = subprocess.run([sys.executable, "-c", KILLED], env=environment, stdout=file)
    assert killed.returncode == -signal.SIGKILL
    children = (tmp_path / "pids").read_text().split()
    assert len(children) == 2
    end = time.monotonic() + 10
    while any(map(is_running, children)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in children if is_running(pid)]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert left == []


def test_the_hash_of_ppo_is_that_of_policy_and_critic(monkeypatch, tmp_path):
    def digest(**summary):
        found = {"parameter_digest": "aa", "consistency/tokens": 1} | summary
        found["consistency/mismatched_tokens"] = 0
        monkeypatch.setattr(processes, "train", lambda config, announce: found)
        return processes._outcome(cell, 1, "cpu", tmp_path)["digest"]

    monkeypatch.setattr(processes, "read_metrics", lambda file: [])
    cell = Cell(
        dtype="float32", strategy="replicated", micro_batch=4, world_size=1, algorithm="ppo"
    )
    given = [{"critic_digest": "bb"}, {"critic_digest": "bc"}, {}]
    given.append({"critic_digest": "bb", "parameter_digest": "ab"})
    assert len({digest(**summary) for summary in given}) == len(given)
    assert digest() == "aa" and digest(**given[0]) == digest(**given[0])
