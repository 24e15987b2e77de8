"""The hash table's negative controls, and processes that end before their work does."""

import os
import signal
from multiprocessing import active_children

import pytest

from rl_consistency.verify import world
from rl_consistency.verify.mutants.world import WORLD_MUTANTS
from rl_consistency.verify.world import Cell, control_cells, judge, run_cells
from tests.verify.killed import left_behind

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
from rl_consistency.verify.world import Cell
from rl_consistency.verify.world import run_cells

def end(outcome):
    print(*(child.pid for child in active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    cell = Cell(dtype="float32", strategy="replicated", micro_batch=4, world_size=2)
    run_cells([cell] * 50, steps=1, on_outcome=end)
"""


@pytest.mark.thorough
def test_processes_of_a_table_end_with_the_program_that_was_killed(tmp_path):
    """They would train what is left of the table, and hold their GPUs."""
    assert left_behind(KILLED, tmp_path) == []


def test_the_hash_of_ppo_is_that_of_policy_and_critic(monkeypatch, tmp_path):
    def digest(**summary):
        found = {"parameter_digest": "aa", "consistency/tokens": 1} | summary
        found["consistency/mismatched_tokens"] = 0
        monkeypatch.setattr(world, "train", lambda config, announce: found)
        return world._outcome(cell, 1, "cpu", tmp_path)["digest"]

    monkeypatch.setattr(world, "read_metrics", lambda file: [])
    cell = Cell(
        dtype="float32", strategy="replicated", micro_batch=4, world_size=1, algorithm="ppo"
    )
    given = [{"critic_digest": "bb"}, {"critic_digest": "bc"}, {}]
    given.append({"critic_digest": "bb", "parameter_digest": "ab"})
    assert len({digest(**summary) for summary in given}) == len(given)
    assert digest() == "aa" and digest(**given[0]) == digest(**given[0])
