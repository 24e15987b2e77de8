"""Each trainer's definition: by hand on a few tokens, and by an independent formula on many."""

import math
from itertools import chain

import numpy as np
import pytest
import torch

from rl_consistency.parity.drift import compare_logprobs
from rl_consistency.parity.foreign_drift import DEFINITIONS, foreign_drift

LN2, LN4 = math.log(2), math.log(4)
ROLLOUT = [torch.tensor([-LN2, -LN2]), torch.tensor([-LN4])]
TRAINING = [torch.tensor([-LN4, -LN2]), torch.tensor([-LN2])]
"""Probabilities 1/2, 1/2 | 1/4 in rollout and 1/4, 1/2 | 1/2 in training: ratios 1/2, 1 | 2."""


@pytest.fixture(scope="module")
def sides():
    """600 tokens in 7 sequences, off by up to a few percent."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 20, 33, 90, 120, 136, 200]
    rollout = [-4 * torch.rand(n, generator=generator) for n in lengths]
    noise = [0.02 * torch.randn(n, generator=generator) for n in lengths]
    return rollout, [a + d for a, d in zip(rollout, noise)]


def test_definitions_agree_with_formulas_in_fp64_over_padded_rows(sides):
    """The trainers' own shape: [sequences, tokens] with a mask; numpy, probabilities not logs."""
    rollout, training = sides
    width = max(map(len, rollout))
    mask = np.array([[i < len(t) for i in range(width)] for t in rollout])
    p, q = (np.ones(mask.shape) for _ in range(2))
    for rows, side in ((p, rollout), (q, training)):
        for row, values in zip(rows, side):
            row[: len(values)] = np.exp(values.double().numpy())
    count, r = mask.sum(), q / p
    token_mean = lambda x: (x * mask).sum() / count  # noqa: E731
    k3 = token_mean(r - np.log(r) - 1)
    geometric = np.prod(r, 1) ** (1 / mask.sum(1))
    perplexity = {n: np.prod(x, 1) ** (-1 / mask.sum(1)) for n, x in (("p", p), ("q", q))}
    m = (p + q) / 2
    whole = np.where(np.prod(r, 1) > 3, 0, np.prod(r, 1))
    expected = {
        "sampling/sampling_logp_difference/mean": token_mean(abs(np.log(r))),
        "sampling/importance_sampling_ratio/mean": whole.mean(),
        "sampling/importance_sampling_ratio/min": whole.min(),
        "training/rollout_probs_diff_mean": token_mean(abs(q - p)),
        "training/rollout_probs_diff_std": abs(q - p)[mask].std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(q[mask], p[mask])[0, 1],
        "rollout_corr/kl": token_mean(-np.log(r)),
        "rollout_corr/k3_kl": k3,
        "rollout_corr/training_ppl": perplexity["q"].mean(),
        "rollout_corr/rollout_log_ppl": np.log(perplexity["p"]).mean(),
        "rollout_corr/ppl_ratio": (1 / geometric).mean(),
        "rollout_corr/chi2_token": token_mean(r**2) - 1,
        "rollout_corr/chi2_seq": (np.prod(r, 1) ** 2).mean() - 1,
        "mismatch_kl/all/mean": k3,
        "mismatch_kl/all/max": (r - np.log(r) - 1).max(),
        "train/token_mult_prob_error": token_mean(np.maximum(r, 1 / r)),
        "train/gen_kl_error": k3,
        "train/policy_kl_error": token_mean(1 / r + np.log(r) - 1),
        "train/js_divergence_error": token_mean(
            (p / m - np.log(p / m) + q / m - np.log(q / m)) / 2 - 1
        ),
        "train/sampling_importance_ratio": token_mean(r),
    }
    found = foreign_drift(DEFINITIONS, rollout, training)
    assert {n: found[n] for n in expected} == pytest.approx(expected, rel=2e-3, abs=1e-6)
    ours = compare_logprobs(rollout, training)
    assert found["rollout_corr/kl"] == pytest.approx(ours.kl_k1, rel=1e-3)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(ours.max_abs_diff)


def test_equal_sides_have_the_figures_of_no_drift_exactly(sides):
    rollout, _ = sides
    found = foreign_drift(DEFINITIONS, rollout, rollout)
    ones = {
        *(f"sampling/importance_sampling_ratio/{part}" for part in ("min", "mean", "max")),
        *("training/rollout_probs_diff_valid", "rollout_corr/ppl_ratio"),
        *("train/token_mult_prob_error", "train/sampling_importance_ratio"),
    }
    assert {n for n, value in found.items() if value == 1.0} >= ones
    rest = {
        n: v for n, v in found.items() if n not in ones and "ppl" not in n and "corr/r" not in n
    }
    assert rest.pop("training/rollout_actor_probs_pearson_corr") == pytest.approx(1.0)
    # The mixture's logarithm is rounded, in NeMo-RL too.
    assert rest.pop("train/js_divergence_error") == pytest.approx(0.0, abs=1e-6)
    assert set(rest.values()) == {0.0}


def test_what_is_not_finite_is_treated_as_the_trainer_does():
    rollout, training = (
        [torch.zeros(2), torch.zeros(1)],
        [torch.tensor([-1.0, math.nan]), -torch.ones(1)],
    )
    found = foreign_drift(["trl", "nemo_rl"], rollout, training)
    assert found["sampling/sampling_logp_difference/mean"] == 1.0
    assert found["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(-1))
    assert found["train/sampling_importance_ratio"] == pytest.approx(2 * math.exp(-1) / 3)
    assert math.isnan(found["train/gen_kl_error"])


def test_a_ratio_beyond_the_cap_of_trl_counts_as_zero():
    found = foreign_drift(["trl"], [torch.tensor([-2.0])], [torch.tensor([-0.5])])
    assert found["sampling/importance_sampling_ratio/max"] == 0.0


def test_empty_completions_are_left_out():
    none = torch.empty(0)
    with_empty = foreign_drift(DEFINITIONS, [none, *ROLLOUT], [none, *TRAINING])
    assert with_empty == foreign_drift(DEFINITIONS, ROLLOUT, TRAINING)
    with pytest.raises(ValueError, match="all completions are empty"):
        foreign_drift(DEFINITIONS, [none], [none])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="of openrlhf are known; known are trl, verl, prime_rl"):
        foreign_drift(["openrlhf"], ROLLOUT, TRAINING)
    with pytest.raises(ValueError, match="same tokens"):
        foreign_drift(["trl"], ROLLOUT, TRAINING[::-1])


def test_no_two_trainers_share_a_name():
    names = [foreign_drift([name], ROLLOUT, TRAINING) for name in DEFINITIONS]
    assert len(set(chain(*names))) == sum(map(len, names))
