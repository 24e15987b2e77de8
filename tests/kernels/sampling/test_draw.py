"""Draws: inverse CDF in token-id order, row by row, logprobs of the training function."""

import math

import pytest
import torch

from rl_consistency.kernels.sampling.op import SamplingRows, distribution, inverse_cdf
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.kernels.sampling.references import sample

LAST = 1.0 - 2.0**-53


def sampling_rows(params):
    """The sampling parameters of a batch, one entry per row."""
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
    )


def probe_logits(rows, vocab):
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] *= 6.0  # outliers: probabilities over a wide range of exponents
    return logits


def test_a_token_is_where_the_cumulative_probability_passes_u():
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(6, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LAST], dtype=torch.float64)
    assert inverse_cdf(probabilities, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_the_last_supported_token_guards_against_rounding():
    probabilities = torch.tensor([[0.3, 0.7, 0.0, 0.0], [1e-9, 1e-9, 0.0, 0.0]])
    u = torch.full((2,), LAST, dtype=torch.float64)
    assert inverse_cdf(probabilities, u).tolist() == [1, 1]


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf]])
    u = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    rows = sampling_rows([SamplingParams(temperature=0.7)] * len(u))
    token_ids, _ = sample(logits.expand(len(u), -1), rows, u)
    shares = torch.bincount(token_ids, minlength=5) / len(u)
    torch.testing.assert_close(shares, (logits[0] / 0.7).softmax(0), atol=1e-4, rtol=0)


def test_logprobs_are_those_of_the_shared_distribution():
    logits = probe_logits(8, 96)
    params = [SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)] * 8
    rows = sampling_rows(params)
    u = torch.linspace(0.0, LAST, 8, dtype=torch.float64)
    token_ids, logprobs = sample(logits, rows, u)
    assert logprobs.equal(distribution(logits, rows).logprobs_of(token_ids))
    assert torch.isfinite(logprobs).all()


def test_a_row_does_not_depend_on_its_neighbours():
    logits = probe_logits(32, 1000)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_k=50),
        SamplingParams(top_p=0.8, min_p=0.02),
    ] * 8
    u = torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    token_ids, logprobs = sample(logits, sampling_rows(params), u)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    permuted = sample(logits[order], sampling_rows([params[i] for i in order]), u[order])
    assert permuted[0].equal(token_ids[order]) and permuted[1].equal(logprobs[order])
    for i in range(32):
        alone = sample(logits[i : i + 1], sampling_rows([params[i]]), u[i : i + 1])
        assert alone[0].equal(token_ids[i : i + 1]) and alone[1].equal(logprobs[i : i + 1])


def test_greedy_takes_the_lowest_id_among_equal_maxima():
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    rows = sampling_rows([SamplingParams(temperature=0.0)] * 2)
    for u in (0.0, 0.5, LAST):
        token_ids, logprobs = sample(logits, rows, torch.full((2,), u, dtype=torch.float64))
        assert token_ids.tolist() == [1, 0]
        assert logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=0.0),
    ],
)
def test_a_token_outside_the_support_is_never_drawn(params):
    u = torch.linspace(0.0, LAST, 500, dtype=torch.float64)
    logits = probe_logits(1, 64).expand(500, -1)
    rows = sampling_rows([params] * 500)
    token_ids, logprobs = sample(logits, rows, u)
    support = torch.isfinite(distribution(logits[:1], rows.select(slice(0, 1))).scaled[0])
    assert support[token_ids].all() and torch.isfinite(logprobs).all()


def test_nan_logits_give_a_nan_logprob_and_leave_other_rows_alone():
    logits = probe_logits(3, 16)
    rows = sampling_rows([SamplingParams()] * 3)
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    clean = sample(logits, rows, u)
    logits[1, 4] = math.nan
    token_ids, logprobs = sample(logits, rows, u)
    assert math.isnan(logprobs[1].item())
    assert token_ids[[0, 2]].equal(clean[0][[0, 2]]) and logprobs[[0, 2]].equal(clean[1][[0, 2]])
