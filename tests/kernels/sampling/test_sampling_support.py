import math
from dataclasses import fields

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within

ROWS, V = 40, 101


def logits(dtype=torch.float32):
    return probe((ROWS, V), dtype, scale=0.5).float()


def mixed_rows():
    """One of six settings per row."""
    settings = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 0.3, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    ]
    return SamplingRows.concatenate(
        [SamplingRows.uniform(1, **settings[i % len(settings)]) for i in range(ROWS)]
    )


def support(values, **settings):
    values = torch.tensor([values])
    scaled = distribution(values, SamplingRows.uniform(1, **settings)).scaled[0]
    return torch.nonzero(torch.isfinite(scaled)).flatten().tolist()


def results(values, rows):
    one = distribution(values, rows)
    return {"scaled": one.scaled, "normalizer": one.log_normalizer, "entropy": one.entropy()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_matches_fp64(temperature):
    one = distribution(logits(), SamplingRows.uniform(ROWS, temperature=temperature))
    exact = (logits().double() / temperature).log_softmax(-1)
    ids = torch.arange(ROWS) % V
    picked = exact.gather(1, ids[:, None])[:, 0]
    assert ((one.logprobs_of(ids) - picked).abs() <= 1e-6 * picked.abs().clamp(min=1)).all()
    assert_within(one.probabilities(), exact.exp(), "logprob", torch.float32)
    assert_within(one.entropy(), -(exact.exp() * exact).sum(-1), "elementwise", torch.float32)


def test_a_large_maximum_costs_no_precision():
    values = logits() + 3000.0
    one = distribution(values, SamplingRows.uniform(ROWS))
    assert_within(one.probabilities(), values.double().softmax(-1), "elementwise", torch.float32)


def test_truncated_probabilities_are_renormalised():
    one = distribution(logits(), mixed_rows())
    assert_within(one.probabilities().sum(-1), torch.ones(ROWS), "logprob", torch.float32)


def test_greedy_keeps_the_lowest_id_of_a_tie():
    assert support([1.0, 4.0, 4.0, 2.0], temperature=0.0) == [1]
    one = distribution(torch.tensor([[1.0, 4.0, 4.0]]), SamplingRows.uniform(1, temperature=0.0))
    assert one.logprobs_of(torch.tensor([1])).tolist() == [0.0]
    assert one.entropy().tolist() == [0.0]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.2}, [1]),
        ({"top_p": 0.44}, [1]),
        ({"top_p": 0.46}, [1, 2]),  # the first two tie, the lower id ranks first
        ({"top_p": 0.95}, [0, 1, 2]),
        ({"top_p": 0.98}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [1, 2]),
        ({"min_p": 0.1}, [0, 1, 2]),
        ({"min_p": 1.0}, [1, 2]),
        ({"top_k": 3, "top_p": 0.46}, [1]),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.2}, [1, 2]),
        ({"top_k": 2, "min_p": 0.01}, [1, 2]),
        ({"temperature": 100.0, "min_p": 0.9}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_support_is_the_documented_set(settings, expected):
    """Probabilities 0.062, 0.458, 0.458, 0.023; of the first three ranks 0.468, 0.468, 0.063."""
    assert support([1.0, 3.0, 3.0, 0.0], **settings) == expected


def test_a_token_outside_the_support_has_no_probability():
    one = distribution(torch.tensor([[1.0, 3.0, 2.0]]), SamplingRows.uniform(1, top_k=2))
    assert one.logprobs_of(torch.tensor([0])).tolist() == [-math.inf]
    assert one.probabilities()[0, 0] == 0
    assert torch.isfinite(one.entropy()).all()


def test_the_callers_logits_are_left_alone():
    values = logits()
    before = values.clone()
    distribution(values, SamplingRows.uniform(ROWS))
    distribution(values, mixed_rows())
    assert same_bytes(values, before)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
    ],
)
def test_parameters_outside_their_range_are_refused(settings):
    with pytest.raises(ValueError, match=r"allowed: temperature >= 0.*0 < top_p <= 1"):
        SamplingRows.uniform(1, **settings)


def test_bad_operands_are_refused():
    with pytest.raises(TypeError, match=r"logits are torch.bfloat16 .* need fp32"):
        distribution(logits().bfloat16(), SamplingRows.uniform(ROWS))
    with pytest.raises(TypeError, match="need fp32"):
        distribution(logits()[0], SamplingRows.uniform(ROWS))
    with pytest.raises(ValueError, match=r"39 parameters for 40 rows"):
        distribution(logits(), SamplingRows.uniform(ROWS - 1))


def test_an_unstable_sort_fails_the_tie_check(monkeypatch):
    """Ties broken by the higher id: the support of top_k = 1 moves."""
    sort = torch.sort

    def mutant(values, **options):
        ranked, order = sort(values.flip(1), **options)
        return ranked, values.shape[1] - 1 - order

    assert support([3.0, 3.0, 1.0], top_k=1) == [0]
    monkeypatch.setattr(torch, "sort", mutant)
    assert support([3.0, 3.0, 1.0], top_k=1) != [0]


def test_bf16_logits_fail_the_fp64_check():
    one = distribution(logits().bfloat16().float(), SamplingRows.uniform(ROWS))
    assert not torch.allclose(
        one.probabilities().double(), logits().double().softmax(-1), atol=1e-5
    )


def test_what_rows_are_known_to_do_follows_them():
    plain = SamplingRows.uniform(3)
    assert not plain.truncates and plain.unit_temperature
    cut = SamplingRows.uniform(2, temperature=0.5, top_k=4)
    assert cut.truncates and not cut.unit_temperature
    both = SamplingRows.concatenate([plain, cut])
    assert both.truncates and not both.unit_temperature
    assert not plain.select(slice(0, 1)).truncates and plain.to("cpu").unit_temperature
    # 1e-50 is 0 in fp32, hence greedy; 1 - 1e-12 is 1, hence no top_p.
    assert SamplingRows.uniform(1, temperature=1e-50).truncates
    assert not SamplingRows.uniform(1, top_p=1 - 1e-12).truncates
    for name in ("truncates", "unit_temperature"):
        asked = SamplingRows(**{f.name: getattr(both, f.name) for f in fields(both)})
        assert getattr(asked, name) == getattr(both, name)


def test_the_mass_of_top_p_is_exact_in_any_order():
    """Equal tokens: the running sum has no rounding that the number of them could show."""
    for count in (3, 1000, 4097):
        values = torch.full((1, count), 0.1)
        one = distribution(values, SamplingRows.uniform(1, top_p=0.5))
        assert int(torch.isfinite(one.scaled).sum()) == -(-count // 2)


def test_a_vocabulary_beyond_the_integer_mass_is_refused():
    values = torch.zeros(1, 2**22 + 1)
    with pytest.raises(ValueError, match="allowed: up to 4194304 ids"):
        distribution(values, SamplingRows.uniform(1, top_p=0.5))
