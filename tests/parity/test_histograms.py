import math

import pytest
import torch

from rl_consistency.parity.histograms import (
    ABS_DIFF,
    HISTOGRAMS,
    NOT_FINITE,
    RATIO,
    drift_histograms,
    split_counts,
)


def test_the_value_of_no_drift_has_a_bin_of_its_own():
    values = torch.tensor([1.0, 1 + 2**-52, 1 - 2**-53], dtype=torch.float64)
    assert RATIO.counts(values) == {"0.999..1": 1, "1": 1, "1..1.001": 1}
    tiny = torch.tensor([0.0, -0.0, 2.0**-149], dtype=torch.float64)
    assert ABS_DIFF.counts(tiny) == {"0": 2, "0..1e-08": 1}


@pytest.mark.parametrize("histogram", HISTOGRAMS, ids=lambda h: h.name)
def test_a_bin_holds_its_lower_edge_and_the_last_one_all_above(histogram):
    above = torch.tensor([2.0 * histogram.edges[-2], 1e300], dtype=torch.float64)
    assert histogram.counts(above) == {histogram.bins[-1]: 2}
    for edge in histogram.edges[:-1]:
        (name,) = histogram.counts(torch.tensor([edge], dtype=torch.float64))
        assert float(name.partition("..")[0]) == pytest.approx(edge)
    assert len(set(histogram.bins)) == len(histogram.edges)


def test_no_value_is_lost():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 3
    values[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    for histogram in HISTOGRAMS:
        counts = histogram.counts(values)
        assert sum(counts.values()) == 1000 and counts[NOT_FINITE] == 3
        assert 0 not in counts.values()


def test_counts_are_metrics_that_can_be_taken_apart_again():
    rollout = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    training = [torch.tensor([-1.0, -2.5]), torch.tensor([math.nan])]
    metrics = drift_histograms(rollout, training)
    binned = {ABS_DIFF: ("0", "0.1..1", "nan"), RATIO: ("1", "0.5..0.8", "nan")}
    names = [f"consistency/{h.name}/count/{name}" for h, found in binned.items() for name in found]
    assert metrics == dict.fromkeys(names, 1)
    rest, counts = split_counts(metrics | {"loss": 0.5})
    assert rest == {"loss": 0.5}
    assert counts == {histogram: dict.fromkeys(found, 1) for histogram, found in binned.items()}
    assert split_counts({"loss": 0.5}) == ({"loss": 0.5}, {})
