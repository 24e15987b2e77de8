"""The check of `verify` that replays layers, on a CPU: green, and red for its mutant."""

import pytest

from rl_consistency.verify.checks import whole_model
from rl_consistency.verify.mutants.perturbations import captured_accumulators_not_zeroed
from rl_consistency.verify.mutants.run import run_controls
from tests.models.captured.recorded_graphs import RecordedLayerGraphs

CHECK = "C3 chain, replayed"


@pytest.fixture
def made(monkeypatch):
    found = []

    def graphs():
        found.append(RecordedLayerGraphs())
        return found[-1]

    monkeypatch.setattr(whole_model, "LayerGraphs", graphs)
    return found


def test_replayed_layers_pass_the_check(made):
    (result,) = run_controls([CHECK])
    assert result.passed and len(made) == 1 and made[0].replays == 2


def test_they_are_replayed_too_after_the_check_of_gradient_checkpointing(made):
    """Which leaves a hook on the embedding."""
    first, second = run_controls(["C3 chain, recomputed", CHECK])
    assert first.passed and second.passed and made[0].replays == 2


def test_accumulators_that_are_not_zeroed_fail_it(made):
    with captured_accumulators_not_zeroed.perturb():
        (result,) = run_controls([CHECK])
    assert not result.passed and made[0].replays == 2
