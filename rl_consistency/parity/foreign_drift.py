"""Drift as other trainers define it, under the names they log it by.

Each function takes the logprobs of the same completion tokens from rollout and training, one fp32
tensor per sequence, and computes in fp32 with the trainer's own steps: their rounding is part of
the figure. Only the order of sums may be another. Definitions are those of one process that holds
the whole batch. Sources:

    trl       huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py, `_generate_and_score_completions`
    verl      volcengine/verl b178a3cd (0.8.0.dev), verl/utils/debug/metrics.py,
              `calculate_debug_metrics`, and verl/trainer/ppo/rollout_corr_helper.py,
              `compute_offpolicy_metrics`
    prime_rl  PrimeIntellect-ai/prime-rl 559b4477 (0.8.0), src/prime_rl/trainer/rl/loss.py,
              `compute_importance_ratio_and_mismatch_kl`, and src/prime_rl/trainer/utils.py,
              `Tensors.compute_stats` and the filter below it
    nemo_rl   NVIDIA-NeMo/RL 7ea279ab (0.6.0), nemo_rl/algorithms/loss/loss_functions.py,
              `ClippedPGLossFn.__call__`; "train/" is the prefix of nemo_rl/algorithms/grpo.py

Not covered: figures that need more than logprobs (prime-rl's kl_ent_ratio and masked KLs), and
those of corrections that are off by default (verl's rollout_is and rollout_rs, NeMo-RL's
is_oob_ratio). An empty completion has no perplexity: verl's figures of sequences leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Sides = Sequence[Tensor]
"""[completion length] fp32 of each sequence."""
Trainer = Literal["trl", "verl", "prime_rl", "nemo_rl"]
"""Trainers whose definitions are known."""

TRL_RATIO_CAP = 3.0
"""TRL's default `vllm_importance_sampling_clip_max`, in its default mode "sequence_mask"."""
VERL_SAFETY_BOUND = 20.0
"""verl's `SAFETY_BOUND`, of a log-ratio before its exponential."""


def foreign_drift(names: Iterable[str], rollout: Sides, training: Sides) -> dict[str, float]:
    """The figures of these trainers, by their names.

    ValueError on an unknown trainer, on sequences that do not fit, and without any token.
    """
    names = list(names)
    check_known(names)
    if [len(part) for part in rollout] != [len(part) for part in training]:
        raise ValueError("both sides must hold the same tokens of the same sequences")
    kept = [i for i, part in enumerate(rollout) if len(part)]
    if not kept:
        raise ValueError("no token to compare: all completions are empty")
    ours = [rollout[i].detach().cpu() for i in kept]
    theirs = [training[i].detach().cpu() for i in kept]
    figures: dict[str, float] = {}
    for name in names:
        figures |= {key: float(value) for key, value in DEFINITIONS[name](ours, theirs).items()}
    return figures


def check_known(names: Iterable[str]) -> None:
    """ValueError on a trainer whose definitions are not here."""
    if unknown := sorted(set(names) - set(DEFINITIONS)):
        known = ", ".join(DEFINITIONS)
        raise ValueError(f"no drift metrics of {', '.join(unknown)} are known; known are {known}")


def _trl(rollout: Sides, training: Sides) -> dict[str, Tensor]:
    ours, theirs = torch.cat([*rollout]), torch.cat([*training])
    delta = (theirs - ours).abs()
    delta = delta[~delta.isnan()]
    if not len(delta):
        delta = torch.zeros(1)
    sums = [(b - a).nan_to_num(nan=0.0).sum() for a, b in zip(rollout, training, strict=True)]
    ratios = torch.stack(sums).exp()
    ratios = ratios.masked_fill(ratios > TRL_RATIO_CAP, 0.0)
    return {
        "sampling/sampling_logp_difference/mean": delta.mean(),
        "sampling/sampling_logp_difference/max": delta.max(),
        "sampling/importance_sampling_ratio/min": ratios.min(),
        "sampling/importance_sampling_ratio/mean": ratios.mean(),
        "sampling/importance_sampling_ratio/max": ratios.max(),
    }


def _verl(rollout: Sides, training: Sides) -> dict[str, Tensor]:
    ours, theirs = torch.cat([*rollout]), torch.cat([*training])
    probabilities = torch.stack([theirs.exp(), ours.exp()])
    difference = (probabilities[0] - probabilities[1]).abs()
    log_ratio = theirs - ours
    bounded = log_ratio.clamp(-VERL_SAFETY_BOUND, VERL_SAFETY_BOUND)
    mean_ours = torch.stack([part.mean() for part in rollout])
    mean_theirs = torch.stack([part.mean() for part in training])
    gap = mean_ours - mean_theirs
    sums = torch.stack([(b - a).sum() for a, b in zip(rollout, training, strict=True)])
    sums = sums.clamp(-VERL_SAFETY_BOUND, VERL_SAFETY_BOUND)
    return {
        "training/rollout_probs_diff_valid": torch.ones(()),
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_std": difference.std(),
        "training/rollout_actor_probs_pearson_corr": torch.corrcoef(probabilities)[0, 1],
        "rollout_corr/training_ppl": (-mean_theirs).exp().mean(),
        "rollout_corr/training_log_ppl": (-mean_theirs).mean(),
        "rollout_corr/kl": (ours - theirs).mean(),
        "rollout_corr/k3_kl": (log_ratio.exp() - log_ratio - 1).mean(),
        "rollout_corr/rollout_ppl": (-mean_ours).exp().mean(),
        "rollout_corr/rollout_log_ppl": (-mean_ours).mean(),
        "rollout_corr/log_ppl_diff": gap.mean(),
        "rollout_corr/log_ppl_abs_diff": gap.abs().mean(),
        "rollout_corr/log_ppl_diff_max": gap.max(),
        "rollout_corr/log_ppl_diff_min": gap.min(),
        "rollout_corr/ppl_ratio": gap.exp().mean(),
        "rollout_corr/chi2_token": bounded.exp().square().mean() - 1,
        "rollout_corr/chi2_seq": (2 * sums).exp().mean() - 1,
    }


def _prime_rl(rollout: Sides, training: Sides) -> dict[str, Tensor]:
    log_ratio = torch.cat([*training]) - torch.cat([*rollout])
    mismatch = log_ratio.exp() - log_ratio - 1
    return {
        "mismatch_kl/all/mean": mismatch.mean(),
        "mismatch_kl/all/std": mismatch.std(),
        "mismatch_kl/all/max": mismatch.max(),
    }


def _nemo_rl(rollout: Sides, training: Sides) -> dict[str, Tensor]:
    generation, previous = torch.cat([*rollout]), torch.cat([*training])
    mixture = (0.5 * previous.exp() + 0.5 * generation.exp()).log()
    ratio = (previous - generation).exp()
    far = [(side - mixture).exp() - (side - mixture) - 1 for side in (previous, generation)]
    return {
        "train/token_mult_prob_error": (generation - previous).abs().exp().mean(),
        "train/gen_kl_error": _schulman(generation, previous).mean(),
        "train/policy_kl_error": _schulman(previous, generation).mean(),
        "train/js_divergence_error": (0.5 * far[0] + 0.5 * far[1]).mean(),
        "train/sampling_importance_ratio": ratio.nan_to_num(0.0, 0.0, 0.0).mean(),
    }


def _schulman(logprobs: Tensor, reference: Tensor) -> Tensor:
    """NeMo-RL's `calculate_kl`, its default type "k3"."""
    log_ratio = reference - logprobs
    return log_ratio.exp() - 1 - log_ratio


DEFINITIONS: Mapping[str, Callable[[Sides, Sides], dict[str, Tensor]]] = {
    "trl": _trl,
    "verl": _verl,
    "prime_rl": _prime_rl,
    "nemo_rl": _nemo_rl,
}
