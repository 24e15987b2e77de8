import math

import pytest
import torch

from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.parity.drift import (
    Sample,
    WorstToken,
    compare_logprobs,
    mismatched_sequences,
    total_of,
    worst_tokens,
)


def logprobs(n, seed=0):
    return -torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 5


def next_float(values):
    return torch.nextafter(values, torch.full_like(values, math.inf))


def test_equal_logprobs_pass_with_every_figure_exact():
    report = compare_logprobs(logprobs(1000), logprobs(1000))
    assert report.passed and report.first_mismatch is None
    assert report.tokens == 1000 and report.mismatched_tokens == 0 and report.max_ulp == 0
    assert report.ratio_min == report.ratio_mean == report.ratio_max == 1.0
    zeros = [report.mean_abs_diff, report.max_abs_diff, report.kl_k1, report.kl_k3]
    assert all(value == 0.0 and math.copysign(1, value) == 1 for value in zeros)
    assert math.copysign(1, compare_logprobs(logprobs(1), logprobs(1)).kl_k1) == 1


def test_the_worked_example_of_the_docstring():
    report = compare_logprobs(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]))
    assert (report.tokens, report.mismatched_tokens, report.first_mismatch) == (2, 1, 1)
    assert (report.mean_abs_diff, report.max_abs_diff, report.kl_k1) == (0.25, 0.5, 0.25)
    assert report.kl_k3 == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2, rel=1e-14)
    assert report.ratio_min == pytest.approx(math.exp(-0.5)) and report.ratio_max == 1.0
    assert report.clip_fraction == 0.5 and report.mismatch_fraction == 0.5
    assert report.max_ulp == 2**21 and report.mean_ulp == 2**20
    assert not report.passed


def test_one_flipped_low_bit_is_found_and_located():
    training = logprobs(500).clone()
    training[321] = next_float(training[321])
    report = compare_logprobs(logprobs(500), training)
    assert not report.passed
    assert (report.mismatched_tokens, report.max_ulp, report.first_mismatch) == (1, 1, 321)


def test_mutant_a_comparison_with_a_tolerance_is_blind_to_that_bit():
    training = next_float(logprobs(500))
    assert torch.allclose(logprobs(500), training)
    assert compare_logprobs(logprobs(500), training).mismatched_tokens == 500


def test_the_two_zeros_differ_by_one_ulp():
    report = compare_logprobs(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not report.passed
    assert (report.mismatched_tokens, report.max_ulp, report.max_abs_diff) == (1, 1, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["rollout", "training", "both"])
def test_a_nonfinite_token_is_counted_and_fails(bad, sides):
    a, b = logprobs(10), logprobs(10)
    if sides in ("rollout", "both"):
        a[4] = bad
    if sides in ("training", "both"):
        b[4] = bad
    report = compare_logprobs(a, b)
    assert not report.passed
    assert (report.nonfinite_tokens, report.mismatched_tokens, report.first_mismatch) == (1, 1, 4)
    assert not math.isfinite(report.mean_abs_diff) and not math.isfinite(report.max_abs_diff)


def test_masked_positions_do_not_count_and_indices_stay_those_of_the_input():
    a = torch.tensor([[-1.0, math.nan, -3.0], [-4.0, -5.0, 0.0]])
    b = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.5, 9.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    report = compare_logprobs(a, b, mask)
    assert (report.tokens, report.positions, report.first_mismatch) == (4, 6, 4)
    assert report.nonfinite_tokens == 0 and report.max_abs_diff == 0.5
    assert report == compare_logprobs(a, b, mask.bool())


@pytest.mark.parametrize(
    ("a", "b", "mask", "message"),
    [
        (torch.zeros(3), torch.zeros(4), None, r"\[3\].*\[4\]"),
        (torch.zeros(2, 3), torch.zeros(6), None, "training has"),
        ([torch.zeros(2), torch.zeros(1)], [torch.zeros(1), torch.zeros(2)], None, "sequence 0"),
        ([torch.zeros(2)], [torch.zeros(1), torch.zeros(1)], None, "1 sequences"),
        ([torch.zeros(2)], torch.zeros(3), None, "2 tokens"),
        (torch.zeros(3), torch.zeros(3), torch.ones(2, dtype=torch.bool), "mask has"),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool), "no active token"),
        (torch.zeros(0), torch.zeros(0), None, "no active token"),
        ([], [], None, "no active token"),
    ],
)
def test_inputs_that_cannot_be_compared_are_refused(a, b, mask, message):
    with pytest.raises(ValueError, match=message):
        compare_logprobs(a, b, mask)


def test_lists_of_floats_are_taken_as_engines_give_them():
    rollout = [torch.tensor([-0.1, -2.5, -1e-5]), torch.tensor([-0.3]), torch.tensor([])]
    training = [part.clone() for part in rollout]
    training[0][1] = torch.nextafter(training[0][1], torch.tensor(0.0))
    expected = compare_logprobs(rollout, training, torch.tensor([True, True, False, True]))
    lists = [[part.tolist() for part in side] for side in (rollout, training)]
    assert compare_logprobs(*lists, [[1, 1, 0], [True], []]) == expected
    assert compare_logprobs(lists[0], training, [[1, 1, 0], [True], []]) == expected
    flat = [[value for part in side for value in part] for side in lists]
    assert compare_logprobs(*flat, [True, True, False, True]) == expected
    assert expected.mismatched_tokens == 1 and expected.tokens == 3


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"training": torch.zeros(2).bfloat16()},
            TypeError,
            "training logprobs must be torch.f",
        ),
        ({"mask": torch.ones(2)}, TypeError, "mask must be bool or integer"),
        ({"mask": [True, None]}, TypeError, "a bool stands among what is compared"),
        ({"mask": [0.5, 1.0]}, TypeError, "mask must be bool or integer"),
        ({"training": [[-0.5, None]]}, TypeError, "a list stands among what is compared"),
        ({"training": [-0.5]}, ValueError, "training has shape"),
        ({"routing": torch.zeros(2)}, ValueError, "routing is a pair"),
        (
            {"routing": (torch.arange(2), None)},
            ValueError,
            "only the rollout has routing",
        ),
        (
            {"routing": (None, torch.arange(2))},
            ValueError,
            "only the training has routing",
        ),
        ({"routing": (torch.arange(2), torch.arange(3))}, ValueError, "training's routing has"),
    ],
)
def test_what_is_compared_is_checked_by_name(given, error, message):
    sides = {"rollout": torch.zeros(2), "training": torch.zeros(2), "routing": (None, None)}
    assert compare_logprobs(**sides).rerouted_tokens is None
    with pytest.raises(error, match=message):
        compare_logprobs(**sides | given)


def test_merged_reports_equal_the_report_of_the_whole():
    a, b = logprobs(100), logprobs(100).clone()
    b[37:] += 0.25
    whole, parts = compare_logprobs(a, b), (side.split([10, 50, 40]) for side in (a, b))
    merged = total_of([None, *map(compare_logprobs, *parts)])
    assert merged.rerouted_tokens is whole.rerouted_tokens is None
    for name, value in vars(whole).items():
        if value is not None and name != "likely_cause":
            assert getattr(merged, name) == pytest.approx(value, rel=1e-12), name
    assert merged.first_mismatch == 37 and merged.likely_cause == whole.likely_cause


def test_merging_never_hides_a_nan():
    bad = compare_logprobs(torch.tensor([math.nan]), torch.tensor([-1.0]))
    good = compare_logprobs(logprobs(5), logprobs(5))
    for merged in (good.merge(bad), bad.merge(good)):
        assert not merged.passed and merged.nonfinite_tokens == 1
        assert math.isnan(merged.max_abs_diff) and math.isnan(merged.ratio_min)


def test_offending_sequences_are_named():
    a = [logprobs(3), logprobs(0), logprobs(2, seed=1), logprobs(4, seed=2)]
    b = [part.clone() for part in a]
    b[2] = next_float(b[2])
    assert mismatched_sequences(a, b) == [2]


def test_tokens_that_met_other_experts_are_counted_and_fail_a_report():
    a, routing = logprobs(6), torch.arange(6)
    other = routing.clone()
    other[[1, 4]] = 9
    split = list(a.split([2, 4]))
    equal = compare_logprobs(split, split, routing=(list(routing.split([2, 4])),) * 2)
    found = compare_logprobs(a, a, routing=(routing, other))
    assert (equal.rerouted_tokens, found.rerouted_tokens) == (0, 2)
    assert equal.passed and not found.passed and found.mismatched_tokens == 0
    assert found.metrics("x")["x/rerouted_tokens"] == 2
    assert "x/rerouted_tokens" not in compare_logprobs(a, a).metrics("x")
    assert compare_logprobs(a, a, a > a.min(), routing=(routing, other)).rerouted_tokens <= 2
    assert found.merge(equal).rerouted_tokens == 2
    assert equal.merge(compare_logprobs(a, a)).rerouted_tokens is None
    for merged in (found.merge(compare_logprobs(a, a)), compare_logprobs(a, a).merge(found)):
        assert merged.rerouted_tokens == 2 and not merged.passed


COMPLETIONS = [[5, 6, 7], [], [8, 9]]
PLACES = [(40, 0), (40, 1), (41, 0)]


def table(rollout, training, **given):
    sides = [[torch.tensor(part) for part in side] for side in (rollout, training)]
    samples = list(map(Sample, COMPLETIONS, PLACES, *sides))
    return worst_tokens(samples, lambda ids: f"<{ids[0]}>", **given)


ROLLOUT = [[-1.0, -2.0, -3.0], [], [-1.0, -1.0]]
TRAINING = [[-1.0, -2.5, -3.25], [], [-1.0, 0.0]]


def test_the_largest_difference_is_first_and_equal_tokens_are_left_out():
    assert table(ROLLOUT, TRAINING) == [
        WorstToken("<9>", 41, 0, 1, -1.0, 0.0, 1.0),
        WorstToken("<6>", 40, 0, 1, -2.0, -2.5, -0.5),
        WorstToken("<7>", 40, 0, 2, -3.0, -3.25, -0.25),
    ]
    assert [row.token for row in table(ROLLOUT, TRAINING, most=2)] == ["<9>", "<6>"]
    assert table(ROLLOUT, ROLLOUT) == []


def test_what_is_not_finite_comes_before_every_difference():
    training = [[math.nan, -2.5, -math.inf], [], [-1.0, 0.0]]
    assert [row.token for row in table(ROLLOUT, training)] == ["<5>", "<7>", "<9>", "<6>"]
    both = [[-1.0, math.nan, -3.0], [], [-1.0, -1.0]]
    assert [row.token for row in table(both, both)] == ["<6>"]


def test_bits_count_not_values():
    rows = table([[0.0, -2.0, -3.0], [], [-1.0, -1.0]], [[-0.0, -2.0, -3.0], [], [-1.0, -1.0]])
    assert [(row.token, row.difference) for row in rows] == [("<5>", 0.0)]


def rescored(noise=0.0, **sampling):
    """Logprobs of tokens under these parameters, and of the same tokens under plain ones."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(torch.randn(256, 1, generator=generator))
    logits = scales * torch.randn(256, 500, generator=generator)
    behaviour = distribution(logits, SamplingRows.uniform(256, **sampling))
    tokens = behaviour.probabilities().multinomial(1, generator=generator).squeeze(1)
    logits = logits + noise * scales * torch.randn(256, 500, generator=generator)
    plain = distribution(logits, SamplingRows.uniform(256))
    return behaviour.logprobs_of(tokens), plain.logprobs_of(tokens)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 0.9},
        {"temperature": 1.3},
        {"top_p": 0.95},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 50},
        {"temperature": 1.2, "top_p": 0.9},
    ],
    ids=str,
)
def test_forgotten_sampling_parameters_are_named_as_the_likely_cause(sampling):
    rollout, training = rescored(**sampling)
    for sides in ((rollout, training), (training, rollout)):
        report = compare_logprobs(*sides)
        assert "likely cause: the sides have other sampling parameters" in report.sentence()
        assert "sampling=" in repr(report)
        assert report.merge(compare_logprobs(rollout, rollout)).likely_cause


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2, 0.1, 0.3])
def test_other_drift_is_not_blamed_on_sampling(noise):
    """Negative control: from rounding to other weights, nearly all tokens differ as well."""
    report = compare_logprobs(*rescored(noise=noise))
    assert report.likely_cause is None and "likely" not in report.sentence()
    assert (report.mismatch_fraction > 0.9) == (noise > 0)
    few = [part[:8] for part in rescored(temperature=0.6)]
    assert compare_logprobs(*few).likely_cause is None
