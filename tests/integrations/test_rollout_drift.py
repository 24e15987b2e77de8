import math
from types import SimpleNamespace

import pytest
import torch

from rl_consistency import parity
from rl_consistency.integrations import rollout_drift
from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.integrations.sampled import Sampled
from rl_consistency.models.scoring.token_logprobs import LabelLogprobs


@pytest.fixture
def drift():
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(num_processes=1),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(report_to=[]),
    )
    return RolloutDrift(trainer)


def sample(prompt, tokens, logprobs, routing=None):
    met = None if routing is None else [torch.tensor(routing)]
    return [prompt], Sampled([tokens], [torch.tensor(logprobs)], met)


def observe(drift, ids, scored, logprobs, *, left=0, routing=None):
    """A row of training, padded by `left` columns before it and one after; `scored` per token."""
    pad = [0] * left
    tokens = torch.tensor([[*pad, *[1] * len(ids), 0]]).bool()
    mask = torch.tensor([[*pad, *scored, 0]]).bool()[:, 1:]
    values = torch.zeros(mask.shape)
    values[mask] = torch.tensor(logprobs)
    met = None
    if routing is not None:
        met = torch.zeros(mask.shape, dtype=torch.int64)
        met[mask] = torch.tensor(routing)
    scores = LabelLogprobs(values, values, mask, None, met)
    drift.observe(torch.tensor([[*pad, *ids, 0]]), tokens, scores)


def end_step(drift):
    drift.on_step_end(None, None, None)


def test_the_device_is_not_waited_for_until_the_step_ends(drift):
    drift.sampled(*sample([7, 8], [3], [-1.0]))
    observe(drift, [7, 8, 3], [0, 0, 1], [-1.5])
    assert drift._monitor.total is None
    end_step(drift)
    assert drift._monitor.total.mismatched_tokens == 1
    end_step(drift)
    assert drift.report.tokens == 1


def test_what_was_observed_is_compared_with_the_rollout_before_it(drift):
    drift.sampled(*sample([7, 8], [3], [-1.0]))
    observe(drift, [7, 8, 3], [0, 0, 1], [-1.0])
    drift._trainer.state.global_step = 1
    drift.sampled(*sample([7, 8], [3], [-2.0]))
    assert drift.take()["consistency/mismatched_tokens"] == 0


def test_a_row_is_found_by_its_tokens_whatever_its_padding(drift):
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    for left in (0, 3):
        observe(drift, [7, 8, 3, 4], [0, 0, 1, 1], [-1.0, -2.0], left=left)
    assert drift.report.tokens == 4 and drift.report.passed
    observe(drift, [7, 8, 3, 4], [0, 0, 1, 1], [-1.0, -2.5])
    assert drift.report.mismatched_tokens == 1
    assert drift.take()["consistency/logprob_abs_diff/max"] == 0.5
    assert drift.take() == {}


def test_all_turns_of_a_row_are_compared_and_what_a_tool_wrote_is_not(drift):
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    drift.sampled(*sample([7, 8, 3, 4, 9, 9], [5], [-3.0]))
    observe(drift, [7, 8, 3, 4, 9, 9, 5], [0, 0, 1, 1, 0, 0, 1], [-1.0, -2.0, -3.5])
    figures = drift.take()
    assert figures["consistency/tokens"] == 3 and figures["consistency/mismatched_tokens"] == 1
    assert "consistency/uncompared_tokens" not in figures


def test_what_a_tool_wrote_between_two_turns_may_be_scored(drift):
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    drift.sampled(*sample([7, 8, 3, 4, 9, 9], [5], [-3.0]))
    observe(drift, [7, 8, 3, 4, 9, 9, 5], [0, 0, 1, 1, 1, 1, 1], [-1.0, -2.0, -6.0, -6.0, -3.0])
    figures = drift.take()
    assert figures["consistency/tokens"] == 3 and figures["consistency/mismatched_tokens"] == 0
    assert "consistency/uncompared_tokens" not in figures
    observe(drift, [7, 8, 3, 4, 9, 9, 6], [0, 0, 1, 1, 1, 1, 1], [-1.0, -2.0, -6.0, -6.0, -3.0])
    assert drift.take()["consistency/uncompared_tokens"] == 3


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_last_turn_that_trl_has_cut_is_found(drift, cut):
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    drift.sampled(*sample([7, 8, 3, 4, 9], [5, 5, 6], [-3.0, -4.0, -5.0]))
    row, scored = [7, 8, 3, 4, 9, 5, 5, 6][: 5 + cut], [0, 0, 1, 1, 1, 1, 1, 1][: 5 + cut]
    observe(drift, row, scored, [-1.0, -2.0, -6.0, -3.0, -4.0, -5.0][: 3 + cut])
    figures = drift.take()
    assert figures["consistency/tokens"] == 2 + cut
    assert figures["consistency/mismatched_tokens"] == 0
    assert "consistency/uncompared_tokens" not in figures


@pytest.mark.parametrize("left", [0, 3])
def test_tokens_that_met_other_experts_are_counted_in_all_turns(drift, left):
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0], [50, 60]))
    drift.sampled(*sample([7, 8, 3, 4, 9], [5, 5], [-3.0, -4.0], [70, 80]))
    row, scored = [7, 8, 3, 4, 9, 5], [0, 0, 1, 1, 1, 1]  # TRL has cut the last turn
    logprobs, same = [-1.0, -2.0, -6.0, -3.0], [50, 60, 99, 70]
    observe(drift, row, scored, logprobs, left=left, routing=same)
    assert drift.take()["consistency/rerouted_tokens"] == 0
    observe(drift, row, scored, logprobs, left=left, routing=[50, 61, 99, 71])
    figures = drift.take()
    assert figures["consistency/rerouted_tokens"] == 2 and figures["consistency/tokens"] == 3
    assert figures["consistency/mismatched_tokens"] == 0


def test_a_token_that_was_not_sampled_is_counted(drift):
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    observe(drift, [7, 8, 3, 5], [0, 0, 1, 1], [-1.0, -2.0])
    assert drift.take() == {"consistency/uncompared_tokens": 2}


def test_the_same_weights_are_the_first_update_and_others_a_later_one(drift):
    drift.sampled(*sample([7, 8], [3], [-1.0]))
    observe(drift, [7, 8, 3], [0, 0, 1], [-1.0])
    drift._trainer.state.global_step = 1
    observe(drift, [7, 8, 3], [0, 0, 1], [-1.5])
    figures = drift.take()
    assert figures["consistency/mismatched_tokens"] == 0
    assert figures["off_policy/mismatched_tokens"] == 1
    assert drift.report.tokens == 1


def test_a_rollout_of_other_weights_replaces_the_last(drift):
    drift.sampled(*sample([7, 8], [3], [-1.0]))
    drift._trainer.state.global_step = 1
    drift.sampled(*sample([7, 8], [4], [-1.0]))
    observe(drift, [7, 8, 3], [0, 0, 1], [-1.0])
    assert drift.take() == {"consistency/uncompared_tokens": 1}


@pytest.fixture
def of_three(drift, monkeypatch):
    """The figures of a process that gathers those of two others, one of them idle."""

    def of(difference, tokens):
        part = RolloutDrift(drift._trainer)
        ids = [*range(2, 2 + tokens)]
        part.sampled(*sample([1], ids, [-1.0] * tokens))
        observe(part, [1, *ids], [0, *[1] * tokens], [-1.0 - difference, *[-1.0] * (tokens - 1)])
        end_step(part)
        return part._monitor.take(), 1

    drift._trainer.accelerator.num_processes = 3
    everyone = [of(0.5, 4), of(0.25, 2), (drift._monitor.take(), 0)]
    monkeypatch.setattr(rollout_drift, "gather_object", lambda mine: everyone)
    return drift.take


def check_over_processes(figures):
    assert figures["consistency/tokens"] == 6
    assert figures["consistency/mismatched_tokens"] == 2
    assert figures["consistency/logprob_abs_diff/max"] == 0.5
    assert figures["consistency/logprob_abs_diff/mean"] == pytest.approx(0.75 / 6)
    assert figures["consistency/uncompared_tokens"] == 2


def test_maxima_are_maxima_and_counts_are_sums_over_processes(of_three):
    check_over_processes(of_three())


def test_mutant_a_maximum_averaged_over_processes(of_three, monkeypatch):
    """As TRL does with what its trainers log."""
    monkeypatch.setattr(parity.drift, "_extreme", lambda choose, a, b: (a + b) / 2)
    with pytest.raises(AssertionError, match=r"0\.375 == 0\.5"):
        check_over_processes(of_three())


def test_metrics_of_other_trainers_are_of_the_first_update_and_of_all_processes(drift, monkeypatch):
    drift = RolloutDrift(drift._trainer, metrics_of=["trl", "prime_rl"])
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    observe(drift, [7, 8, 3, 4], [0, 0, 1, 1], [-1.0, -2.5])
    end_step(drift)
    samples = drift._monitor.take()
    other = samples._replace(reports={}), 0
    drift.sampled(*sample([7, 8], [5], [-1.0]))
    observe(drift, [7, 8, 5], [0, 0, 1], [-1.0])
    drift._trainer.state.global_step = 1
    observe(drift, [7, 8, 5], [0, 0, 1], [-9.0])
    drift._trainer.accelerator.num_processes = 2
    monkeypatch.setattr(rollout_drift, "gather_object", lambda mine: [*mine, other])
    figures = drift.take()
    assert figures["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5 / 3)
    ratios = figures["sampling/importance_sampling_ratio/mean"]
    assert ratios == pytest.approx((math.exp(-0.5) + 1) / 2)
    assert figures["mismatch_kl/all/max"] == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    drift._trainer.accelerator.num_processes = 1
    assert drift.take() == {}


def test_only_samples_that_differ_are_kept_where_no_figure_needs_the_others(drift):
    for prompt in ([7, 8], [7, 8], [9]):
        drift.sampled(*sample(prompt, [3 + drift._prompts.get(tuple(prompt), [0, 0])[1]], [-1.0]))
    for ids, logprob in (([7, 8, 3], -1.0), ([7, 8, 4], -1.5), ([9, 3], -1.0)):
        observe(drift, ids, [*[0] * (len(ids) - 1), 1], [logprob])
    end_step(drift)
    _, counts, (kept,) = drift._monitor.take()
    assert (kept.tokens, kept.place) == ([4], (0, 1))
    assert counts["consistency/logprob_abs_diff/count/0"] == 2
    assert sum(counts.values()) == 6, "three tokens in each of two histograms"
