"""Lines about the progress of a step: what they say, how often, and when the run will end."""

import io

import pytest
from rich.console import Console

from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.run import train
from rl_consistency.trainers.strategies.strategy import Strategy
from rl_consistency.trainers.tracking import ConsoleTable


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def told_by(progress, *given):
    told = []
    progress.listener = told.append
    progress.tell(*given)
    return told[0]


def test_the_time_left_is_that_of_the_last_steps_without_the_first():
    clock = Clock()
    progress = Progress(10, clock=clock)
    with progress.step(1):
        assert told_by(progress, "rollout", 3, 8) == "step 1/10: rollout 3/8"
        clock.now += 100.0
    with progress.step(2):
        assert progress.seconds_left() == 900.0
        clock.now += 30.0
        assert progress.seconds_left() == 870.0
    with progress.step(3):
        clock.now += 10.0
        assert progress.seconds_left() == 20.0 + 7 * 30.0
        assert told_by(progress, "rewards") == "step 3/10: rewards, about 4 min left"
        clock.now += 80.0
        assert progress.seconds_left() == 7 * 30.0  # it takes longer than expected
    with progress.step(10):
        assert progress.seconds_left() == 60.0


def table(terminal):
    out = io.StringIO()
    clock, progress = Clock(), Progress(3)
    console = Console(file=out, force_terminal=terminal, width=110, color_system=None)
    return out, clock, progress, ConsoleTable(3, console=console, progress=progress, clock=clock)


def test_a_pipe_gets_a_line_of_progress_a_minute():
    out, clock, progress, shown = table(terminal=False)
    for done in range(4):
        progress.tell("rollout", done, 8)
        clock.now += 40.0
    assert out.getvalue().splitlines() == ["step 0/3: rollout 2/8"]
    shown.close()


def test_a_terminal_shows_progress_below_the_table_until_the_step_ends():
    out, clock, progress, shown = table(terminal=True)
    clock.now += 1.0
    progress.tell("training", 4, 8)
    progress.tell("training", 5, 8)
    assert "training 4/8" in out.getvalue() and "5/8" not in out.getvalue()
    before = len(out.getvalue())
    shown.log(1, {"reward/mean": 0.5})
    assert "training" not in out.getvalue()[before:]
    shown.close()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_tells_each_phase_whole(tiny_run, monkeypatch, algorithm):
    told = []
    monkeypatch.setattr(ConsoleTable, "tell", lambda table, line: told.append(line))
    changes = {"algorithm.name": algorithm, "training.steps": 2, "training.eval_every": 2}
    tiny_run(**changes, **{"tracking.console": True, "algorithm.epochs_per_rollout": 2})
    second = [line.partition(",")[0] for line in told if line.startswith("step 2/2: ")]
    for phase in ("rollout 8/8", "rewards", "training 16/16", "evaluation 4/4"):
        assert f"step 2/2: {phase}" in second
    assert all("left" in line for line in told if line.startswith("step 2/2"))


def test_a_run_tells_each_phase_of_its_start_once(tiny_run):
    told = []
    changes = {"training.steps": 1, "warm_start.steps": 1}
    train(tiny_run.config(**changes), starting=told.append)
    build = "building the optimizer and the rollout engine"
    read = ["building the policy", "reading the data", "patching the policy"]
    assert told == [*read, "warm start", build, ""]
    told.clear()
    train(tiny_run.config(**changes | {"training.steps": 2}), resume=True, starting=told.append)
    assert told == [*read, "resuming from the newest checkpoint", build, ""]
    told.clear()
    train(tiny_run.config(), dry_run=True, starting=told.append)
    assert told == [*read, build, "taking a small step", ""]


@pytest.mark.parametrize(("leaves", "name"), [(2, "micro-batch 2"), (8, "run again")])
def test_a_gradient_check_names_what_it_compared(leaves, name, tiny_run, monkeypatch):
    """Of eight leaves each has one of the eight sequences, which no micro-batch can cut."""
    found, check = [], Strategy.check
    monkeypatch.setattr(Strategy, "check", lambda *given: found.append(check(*given)) or found[-1])
    changes = {"training.steps": 1, "training.micro_batch_size": 1}
    changes |= {"consistency.gradient_check_every": 1, "consistency.gradient_leaves": leaves}
    tiny_run(**changes)
    assert [[result.name for result in report.results] for report in found] == [[name]]
