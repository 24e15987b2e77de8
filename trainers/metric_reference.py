"""What each metric of a step means, and which of its values stands for a run.

The names of the metrics file, of wandb and of `docs/metrics.md`, which is made of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from rl_consistency.parity.histograms import ABS_DIFF, RATIO

Standing = Literal["last", "max", "min", "mean"]


class Reference(NamedTuple):
    """One metric, or all whose names fit a pattern with `*`."""

    text: str
    standing: Standing = "last"
    """Which value stands for the run: the worst of what must not happen."""


DRIFT: Mapping[str, Reference] = {
    "tokens": Reference("completion tokens compared"),
    "mismatched_tokens": Reference("of these, tokens whose two logprobs differ in any bit", "max"),
    "mismatch_fraction": Reference("their share", "max"),
    "nonfinite_tokens": Reference("tokens with a NaN or an infinity on a side", "max"),
    "logprob_abs_diff/mean": Reference("mean of |training - rollout|, nats", "max"),
    "logprob_abs_diff/max": Reference("largest |training - rollout|, nats", "max"),
    "ulp/mean": Reference("mean distance in units in the last place of fp32", "max"),
    "ulp/max": Reference("largest such distance", "max"),
    "kl/k1": Reference("mean of rollout - training logprob, nats", "max"),
    "kl/k3": Reference("mean of r - 1 - log r with r = exp(training - rollout), nats", "max"),
    "importance_ratio/min": Reference("smallest r", "min"),
    "importance_ratio/mean": Reference("mean r", "mean"),
    "importance_ratio/max": Reference("largest r", "max"),
    "clip_fraction": Reference("share of tokens with r outside [0.8, 1.2]", "max"),
}
"""Metrics of a comparison of logprobs, below a prefix that says whose."""

ROUTED: Mapping[str, Reference] = {
    "rerouted_tokens": Reference(
        "in a mixture of experts, tokens whose experts differ in some layer", "max"
    ),
}
"""Metrics of such a comparison in sparse models alone."""

METRICS: Mapping[str, Mapping[str, Reference]] = {
    "Reward": {
        "reward/mean": Reference("mean reward of the step's completions"),
        "reward/std": Reference("their standard deviation"),
        "reward/equal_group_fraction": Reference(
            "in GRPO, share of groups whose rewards are all equal: their advantages are 0"
        ),
        "reward/kl": Reference("in PPO, mean over completions of their log-ratio to the reference"),
        "reward/*": Reference("mean of one reward function, by its name, before its weight"),
        "eval/reward": Reference("mean reward of greedy completions of the evaluation set", "max"),
        "warm_start/loss": Reference("loss of the last supervised step before the first rollout"),
    },
    "Prompts and completions": {
        "data/overlong_prompts": Reference(
            "training prompts that were too long, where `data.overlong_prompts` is not error"
        ),
        "completion/length_mean": Reference("mean length, tokens"),
        "completion/length_max": Reference("longest, tokens"),
        "completion/cut_fraction": Reference("share that ended at the token limit"),
    },
    "Policy": {
        "loss": Reference("mean loss of the step's updates"),
        "gradient_norm": Reference("2-norm of the gradient before clipping, mean over updates"),
        "learning_rate": Reference("of the step's last update"),
        "policy/clip_fraction": Reference("share of tokens whose ratio the loss clipped"),
        "policy/entropy": Reference("mean entropy at completion tokens, nats"),
        "policy/balance": Reference(
            "mean load-balancing loss of a sequence, 1 where its experts are met equally often; "
            "where `algorithm.balance_coefficient` is set"
        ),
        "policy/ratio/min": Reference(
            "smallest new / old probability of all updates; 1 in a first one"
        ),
        "policy/ratio/mean": Reference("mean ratio"),
        "policy/ratio/max": Reference("largest ratio of all updates"),
        "policy/kl/rollout": Reference(
            "mean of r - 1 - log r with r = new / old probability, nats"
        ),
        "policy/kl/k1": Reference("mean of logprob - reference logprob, nats"),
        "policy/kl/k3": Reference("mean of r - log r - 1, r = reference / policy, nats"),
    },
    "Critic, in PPO": {
        "value/mean": Reference("mean value of the rollout's tokens"),
        "value/explained_variance": Reference("1 - var(returns - values) / var(returns)"),
        "value/loss": Reference("mean loss of the critic's updates"),
        "value/clip_fraction": Reference("share of tokens whose value the loss clipped"),
        "value/gradient_norm": Reference("2-norm of the critic's gradient, mean over updates"),
    },
    "Consistency: training against rollout, on the first update": {
        **{f"consistency/{name}": text for name, text in (DRIFT | ROUTED).items()},
        f"consistency/{ABS_DIFF.name}/count/*": Reference(
            "tokens whose |training - rollout| is in this bin; in wandb a histogram of its log10"
        ),
        f"consistency/{RATIO.name}/count/*": Reference(
            "tokens whose r is in this bin; in wandb a histogram"
        ),
        "consistency/gradient_check/passed": Reference(
            "whether gradients had the same bytes under other groupings of the batch", "min"
        ),
        "consistency/gradient_check/mismatched_elements": Reference(
            "gradient elements that differed under any of them", "max"
        ),
        "consistency/critic_gradient_check/passed": Reference(
            "the same of the critic's gradients, under another micro-batch and padding", "min"
        ),
        "consistency/critic_gradient_check/mismatched_elements": Reference(
            "gradient elements of the critic that differed", "max"
        ),
        "consistency/value_check/values": Reference("critic's values computed again"),
        "consistency/value_check/mismatched_values": Reference(
            "of these, values that differ under another grouping, order and padding", "max"
        ),
        "consistency/schedule_audit": Reference(
            "sampled elements of library products that differed from ours, on a GPU", "max"
        ),
        "consistency/gradient_digest": Reference("SHA-256 of the digests of all gradients"),
        "consistency/critic_digest": Reference("digest of the critic's weights after the step"),
        "rollout/weights_digest": Reference("`model_digest` of the weights after the step"),
    },
    "Stock path on the same tokens, where `consistency.shadow_every` is set": {
        f"stock/{name}": text for name, text in (DRIFT | ROUTED).items()
    },
    "Drift as other trainers define it, where `tracking.metrics_of` names them": {
        "sampling/sampling_logp_difference/mean": Reference("TRL: mean |training - rollout|"),
        "sampling/sampling_logp_difference/max": Reference("TRL: largest", "max"),
        "sampling/importance_sampling_ratio/min": Reference(
            "TRL: smallest product of a completion's r, 0 where it is over 3", "min"
        ),
        "sampling/importance_sampling_ratio/mean": Reference("TRL: their mean", "mean"),
        "sampling/importance_sampling_ratio/max": Reference("TRL: the largest", "max"),
        "training/rollout_probs_diff_valid": Reference("verl: 1, it was measured"),
        "training/rollout_probs_diff_max": Reference(
            "verl: largest |difference| of probabilities", "max"
        ),
        "training/rollout_probs_diff_mean": Reference("verl: their mean", "max"),
        "training/rollout_probs_diff_std": Reference("verl: their standard deviation", "max"),
        "training/rollout_actor_probs_pearson_corr": Reference(
            "verl: correlation of both sides' probabilities", "min"
        ),
        "rollout_corr/training_ppl": Reference("verl: mean perplexity of completions, training"),
        "rollout_corr/training_log_ppl": Reference("verl: mean of its logarithm"),
        "rollout_corr/kl": Reference("verl: mean of rollout - training logprob", "max"),
        "rollout_corr/k3_kl": Reference("verl: mean of r - log r - 1", "max"),
        "rollout_corr/rollout_ppl": Reference("verl: mean perplexity of completions, rollout"),
        "rollout_corr/rollout_log_ppl": Reference("verl: mean of its logarithm"),
        "rollout_corr/log_ppl_diff": Reference(
            "verl: mean over completions of mean logprob, rollout - training"
        ),
        "rollout_corr/log_ppl_abs_diff": Reference("verl: mean of its absolute value", "max"),
        "rollout_corr/log_ppl_diff_max": Reference("verl: its largest", "max"),
        "rollout_corr/log_ppl_diff_min": Reference("verl: its smallest", "min"),
        "rollout_corr/ppl_ratio": Reference("verl: mean of its exponential"),
        "rollout_corr/chi2_token": Reference("verl: mean of r squared, - 1", "max"),
        "rollout_corr/chi2_seq": Reference(
            "verl: the same of the product of a completion's r", "max"
        ),
        "mismatch_kl/all/mean": Reference("prime-rl: mean of r - log r - 1", "max"),
        "mismatch_kl/all/std": Reference("prime-rl: its standard deviation", "max"),
        "mismatch_kl/all/max": Reference("prime-rl: its largest", "max"),
        "train/token_mult_prob_error": Reference("NeMo-RL: mean of exp |difference|", "max"),
        "train/gen_kl_error": Reference("NeMo-RL: mean of r - 1 - log r", "max"),
        "train/policy_kl_error": Reference("NeMo-RL: the same of 1 / r", "max"),
        "train/js_divergence_error": Reference(
            "NeMo-RL: the same of both sides against their mixture", "max"
        ),
        "train/sampling_importance_ratio": Reference("NeMo-RL: mean r", "mean"),
    },
    "Speed": {
        "tokens_per_second": Reference("completion tokens over the time of the whole step", "mean"),
        "time/step_seconds": Reference("the whole step", "mean"),
        "time/rollout_seconds": Reference("generation", "mean"),
        "time/training_seconds": Reference("passes, and sums over processes", "mean"),
        "time/critic_seconds": Reference("the critic's values, passes and steps", "mean"),
        "time/optimizer_seconds": Reference("optimizer steps", "mean"),
        "time/digest_seconds": Reference("digests of tokens, gradients and weights", "mean"),
        "time/gradient_check_seconds": Reference("the gradient check", "mean"),
        "time/critic_gradient_check_seconds": Reference("that of the critic", "mean"),
        "time/value_check_seconds": Reference("the value check", "mean"),
        "time/shadow_seconds": Reference("the stock path", "mean"),
        "time/rollout_tokens_per_second": Reference("completion tokens in generation", "mean"),
        "time/training_tokens_per_second": Reference("tokens, with prompts, in training", "mean"),
        "time/stock_rollout_tokens_per_second": Reference("the stock path's", "mean"),
        "time/stock_training_tokens_per_second": Reference("the stock path's", "mean"),
        "time/rollout_prefill_tokens_per_second": Reference("prompt tokens read", "mean"),
        "time/rollout_decode_tokens_per_second": Reference("completion tokens decoded", "mean"),
        "time/rollout_mean_seconds_to_first_token": Reference("of a sequence", "mean"),
        "time/rollout_host_seconds_per_step": Reference("host time of an engine step", "mean"),
        "time/rollout_peak_kv_share": Reference("largest share of cache blocks in use", "max"),
        "time/rollout_prefix_hit_tokens": Reference("prompt tokens taken from the cache"),
        "time/rollout_preemptions": Reference("sequences that gave their blocks back", "max"),
        "time/rollout_acceptance_rate": Reference("share of drafted tokens accepted", "mean"),
    },
}
"""Heading -> names."""


def references() -> Iterator[tuple[str, Reference]]:
    """All metrics by name, exact names before patterns."""
    found = [item for section in METRICS.values() for item in section.items()]
    yield from sorted(found, key=lambda item: "*" in item[0])


def reference_of(name: str) -> Reference:
    """What a logged metric is. A name that `METRICS` does not have is a KeyError."""
    for known, reference in references():
        if fnmatchcase(name, known):
            return reference
    raise KeyError(name)
