"""What ends a run costs no step that was taken before it."""

import pytest
import torch

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.hooks import ConsistencyHook
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.rewards import RewardError
from rl_consistency.trainers.run import NoSignal
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from rl_consistency.trainers.run_directory.step_files import StepFiles
from rl_consistency.trainers.tracking import ConsoleTable

DRAWING = """
import random
failing = []

def drawing(prompts, completions, answers, **extra):
    draws = [random.random() for _ in completions]
    if failing and failing.pop():
        raise RuntimeError("no judge at home")
    return draws
"""


DRAWN = {"reward.functions": [{"name": "toy_rewards:drawing"}]}


def fails(tiny_run, error, match, **changes):
    """Runs until the error; the lines that were announced."""
    told = []
    with pytest.raises(error, match=match):
        tiny_run(**changes, announce=told.append)
    return told


@pytest.fixture
def drawing_rewards(tiny_run):
    """A reward function that draws from Python's generator, before it fails where `failing` says
    so of its next call."""
    file = tiny_run.directory / "toy_rewards.py"
    file.write_text(DRAWING)
    import toy_rewards

    return toy_rewards


def test_a_reward_function_that_fails_costs_no_step_before(tiny_run, lasting, drawing_rewards):
    changes = {"training.steps": 5, **DRAWN}
    changes |= {"training.save_every": 0, "algorithm.kl_coefficient": 0.1}
    _, rows = tiny_run.of_its_own("whole", **changes)
    drawing_rewards.failing[:] = [True, False, False, False]
    told = fails(tiny_run, RewardError, "no judge at home", **changes)
    assert told[-1] == "step 4 ended before anything was learned; step_000003 is saved"
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


def test_a_mended_reward_function_goes_on_where_the_recipe_accepts_it(tiny_run, drawing_rewards):
    changes = {"training.steps": 3, **DRAWN}
    drawing_rewards.failing[:] = [True, False]
    with pytest.raises(RewardError, match="no judge at home"):
        tiny_run(**changes)
    with (tiny_run.directory / "toy_rewards.py").open("a") as file:
        file.write("# mended\n")
    with pytest.raises(CheckpointError, match="set reward.accept_changed=true to go on"):
        tiny_run(**changes, resume=True)
    accepting = changes | {"reward.accept_changed": True}
    with pytest.raises(CheckpointError, match="algorithm.loss") as refused:
        tiny_run(**accepting | {"algorithm.loss": "dr_grpo"}, resume=True)
    assert "accept_changed" not in str(refused.value)
    _, rows = tiny_run(**accepting, resume=True)
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_drift_that_is_found_once_weights_have_changed_saves_none_of_them(tiny_run, monkeypatch):
    real = ConsistencyHook.on_step_end

    def drifts(self):
        if self._current.step == 3:
            raise ConsistencyError("a product differed")
        return real(self)

    monkeypatch.setattr(ConsistencyHook, "on_step_end", drifts)
    with pytest.raises(ConsistencyError, match="a product differed"):
        tiny_run()
    assert tiny_run.checkpoints() == []


@pytest.mark.thorough
@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("full"), SystemExit(1)])
def test_output_that_nobody_takes_costs_no_step(tiny_run, lasting, monkeypatch, error):
    """The metrics are on disk by then; rich exits where its reader has left."""
    changes = {"training.steps": 5, "tracking.console": True}
    _, rows = tiny_run.of_its_own("whole", **changes)
    real = ConsoleTable.log

    def failing(self, step, metrics):
        if step == 3:
            raise error
        real(self, step, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(ConsoleTable, "log", failing)
        with pytest.raises(type(error)):
            tiny_run(**changes)
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)


def test_metrics_that_the_disk_does_not_take_leave_no_checkpoint(tiny_run, monkeypatch):
    """Negative control: a checkpoint without its step's metrics could not be continued."""

    def failing(self, step, metrics):
        raise OSError("disk full")

    monkeypatch.setattr(StepFiles, "log", failing)
    with pytest.raises(OSError, match="disk full"):
        tiny_run()
    assert tiny_run.checkpoints() == []


def test_drift_costs_no_step_before_and_the_run_goes_on_where_it_only_warns(tiny_run, monkeypatch):
    real, armed = ConsistencyHook.on_training_logprobs, [True]

    def drifts(self, logprobs, routing=None):
        if self._current.step == 3 and armed.pop():
            logprobs = [part + 1.0 for part in logprobs]
        return real(self, logprobs, *([] if routing is None else [routing]))

    monkeypatch.setattr(ConsistencyHook, "on_training_logprobs", drifts)
    told = fails(tiny_run, ConsistencyError, "or set consistency.on_drift to warn")
    assert told[-1] == "step 3 ended before anything was learned; step_000002 is saved"
    armed[:] = [True]
    _, rows = tiny_run(**{"consistency.on_drift": "warn"}, resume=True)
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_a_failure_in_the_first_step_saves_nothing(tiny_run, drawing_rewards):
    drawing_rewards.failing[:] = [True]
    with pytest.raises(RewardError, match="no judge at home"):
        tiny_run(**DRAWN)
    assert tiny_run.checkpoints() == []


@pytest.mark.thorough
def test_rewards_that_fail_in_an_evaluation_cost_no_step(tiny_run, lasting, drawing_rewards):
    changes = {**DRAWN, "training.eval_every": 2}
    changes |= {"training.save_every": 0, "training.steps": 4}
    _, rows = tiny_run.of_its_own("whole", **changes)
    drawing_rewards.failing[:] = [True, False, False, False]  # at step 0, 1, 2, and after step 2
    with pytest.raises(RewardError, match="no judge at home"):
        tiny_run(**changes)
    _, resumed = tiny_run(**changes, resume=True)
    found, right = ([dict(row) for row in lasting(each)] for each in (resumed, rows))
    assert right[2].pop("eval/reward") and found == right


def test_rewards_that_fail_before_the_first_step_cost_no_warm_start(tiny_run, drawing_rewards):
    changes = {**DRAWN, "warm_start.steps": 2}
    changes |= {"warm_start.batch_size": 4}
    for key, value in {"eval_every": 2, "save_every": None}.items():
        drawing_rewards.failing[:] = [True]
        with pytest.raises(RewardError, match="no judge at home"):
            tiny_run.of_its_own(key, **changes, training={"steps": 3, key: value})
        assert tiny_run.checkpoints(key) == ["step_000000"]


@pytest.mark.parametrize("where", ["before the rollout", "before training"])
def test_weights_that_somebody_has_written_are_not_saved_as_the_step_before(
    tiny_run, monkeypatch, where
):
    """The run ends with drift or another digest; an older checkpoint stays."""
    changes = {"training.steps": 6, "training.save_every": 2, "training.keep_checkpoints": 1}
    roll_out, learn, count = GRPOTrainer._roll_out, GRPOTrainer._learn, []

    def write(self):
        with torch.no_grad():
            next(self.model.parameters()).view(-1)[:50] += 0.25

    def rolling(self, step):
        if where == "before the rollout" and step == 4:
            write(self)
        return roll_out(self, step)

    def learning(self, experience):
        count.append(1)
        if where == "before training" and len(count) == 4:
            write(self)
        return learn(self, experience)

    monkeypatch.setattr(GRPOTrainer, "_roll_out", rolling)
    monkeypatch.setattr(GRPOTrainer, "_learn", learning)
    told = fails(tiny_run, ConsistencyError, "", **changes)
    assert told[-1] == "step 4 ended before anything was learned; step_000003 is not saved"
    assert tiny_run.checkpoints() == ["step_000002"]


def test_gradients_that_are_not_finite_cost_no_step_before(tiny_run, monkeypatch):
    real, count = PolicyOptimizer.step, []

    def step(self, norm=None):
        count.append(1)
        return real(self, float("inf") if len(count) == 3 else norm)

    monkeypatch.setattr(PolicyOptimizer, "step", step)
    with pytest.raises(ValueError, match="the gradient norm is inf; no weight was changed"):
        tiny_run()
    assert tiny_run.checkpoints() == ["step_000002"]


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["progress", "a warning"])
def test_a_line_that_nobody_takes_in_the_middle_of_a_step_costs_none(
    tiny_run, lasting, monkeypatch, where
):
    changes = {"training.steps": 5, "tracking.console": True}
    _, rows = tiny_run.of_its_own("whole", **changes)
    look, tell = NoSignal.look, Progress.tell

    def warning(self, step, metrics):
        if step == 3:
            self.warn("nothing is learned")
        look(self, step, metrics)

    def telling(self, phase, done=0, total=0):
        if self._step == 3 and where == "progress":
            self.listener("half of step 3")
        tell(self, phase, done, total)

    def gone(line):
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "tell", telling)
        if where == "progress":
            patched.setattr(ConsoleTable, "tell", lambda self, line: gone(line))
            announce = {}
        else:
            patched.setattr(NoSignal, "look", warning)
            announce = {"announce": gone}
        with pytest.raises(BrokenPipeError):
            tiny_run(**changes, **announce)
    _, resumed = tiny_run(**changes, resume=True)
    assert lasting(resumed) == lasting(rows)
