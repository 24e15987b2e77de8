"""Every metric of a run, once: what it means, which value stands for the run, where it is shown.

The metrics file, wandb, its dashboard, the HTML page and `docs/metrics.md` are made of this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from rl_consistency.parity.histograms import ABS_DIFF, RATIO, Histogram

Standing = Literal["last", "max", "min", "mean"]
Look = Literal["stock", "mean", "ours", "second", "sparse"]
LOOKS: tuple[Look, ...] = ("stock", "mean", "ours", "second", "sparse")
"""How curves are drawn, in the order in which those of a panel are."""
Kind = Literal["lines", "difference", "share", "checks", "stacked", "histogram", "table"]
"""`lines`: curves over the steps. `difference`: on a logarithmic axis with a place for zero.
`share`: in percent. `checks`: points, each passed or failed. `stacked`: seconds, added up.
`histogram`: tokens by step and bin. `table`: the worst tokens of a step."""

WORST_TOKENS = "consistency/worst_tokens"
"""wandb's name of the table of worst tokens."""


class Metric(NamedTuple):
    """One metric, or all whose names fit a pattern with `*`."""

    text: str
    standing: Standing = "last"
    """Which value stands for the run: the worst of what must not happen."""
    panel: str = ""
    """Title of the panel that draws it; empty: none."""
    label: str = ""
    look: Look = "ours"
    trl: str | None = ""
    """Its name in wandb where `attach` is in a trainer of TRL; None where TRL has none. Empty: the
    name with the prefix "train/" of transformers."""
    figure: str = ""
    """What it is in a `DriftReport`; empty: what its name says."""


KL, REROUTED = "KL, rollout to training", "Tokens that met other experts"
CHECKS = "Gradient elements changed by regrouping the batch"
SECONDS = "Seconds per step, by phase"
"""Titles of panels with several curves."""

DRIFT: Mapping[str, Metric] = {
    "tokens": Metric("completion tokens compared"),
    "mismatched_tokens": Metric("of these, tokens whose two logprobs differ in any bit", "max"),
    "mismatch_fraction": Metric("their share", "max", "Tokens whose bits differ", "rl_consistency"),
    "nonfinite_tokens": Metric("tokens with a NaN or an infinity on a side", "max"),
    "logprob_abs_diff/mean": Metric(
        "mean of |training - rollout|, nats", "max", figure="mean_abs_diff"
    ),
    "logprob_abs_diff/max": Metric(
        "largest |training - rollout|, nats",
        "max",
        "Logprob difference",
        "rl_consistency, max",
        figure="max_abs_diff",
    ),
    "ulp/mean": Metric(
        "mean distance in units in the last place of fp32", "max", figure="mean_ulp"
    ),
    "ulp/max": Metric("largest such distance", "max", figure="max_ulp"),
    "kl/k1": Metric(
        "mean of rollout - training logprob, nats", "max", KL, "−log r", "second", figure="kl_k1"
    ),
    "kl/k3": Metric(
        "mean of r - 1 - log r with r = exp(training - rollout), nats",
        "max",
        KL,
        "r − 1 − log r",
        figure="kl_k3",
    ),
    "importance_ratio/min": Metric(
        "smallest r", "min", "Importance ratio", "min", "second", figure="ratio_min"
    ),
    "importance_ratio/mean": Metric(
        "mean r", "mean", "Importance ratio", "mean", "mean", figure="ratio_mean"
    ),
    "importance_ratio/max": Metric(
        "largest r", "max", "Importance ratio", "max", "stock", figure="ratio_max"
    ),
    "clip_fraction": Metric("share of tokens with r outside [0.8, 1.2]", "max"),
}
"""Metrics of a comparison of logprobs, below a prefix that says whose."""

ROUTED: Mapping[str, Metric] = {
    "rerouted_tokens": Metric(
        "in a mixture of experts, tokens whose experts differ in some layer",
        "max",
        REROUTED,
        "rl_consistency",
    ),
}
"""Metrics of such a comparison in sparse models alone."""

_STOCK: Mapping[str, tuple[str, str, Look]] = {
    "mismatch_fraction": ("Tokens whose bits differ", "stock", "stock"),
    "logprob_abs_diff/mean": ("Logprob difference", "stock, mean", "mean"),
    "logprob_abs_diff/max": ("Logprob difference", "stock, max", "stock"),
    "rerouted_tokens": (REROUTED, "stock", "stock"),
}


def _of_stock(name: str, metric: Metric) -> Metric:
    """The same of the stock path, which TRL does not have."""
    panel, label, look = _STOCK.get(name, ("", "", "ours"))
    return metric._replace(panel=panel, label=label, look=look, trl=None)


METRICS: Mapping[str, Mapping[str, Metric]] = {
    "Reward": {
        "reward/mean": Metric(
            "mean reward of the step's completions",
            panel="Mean reward",
            label="training completions",
            trl="train/reward",
        ),
        "reward/std": Metric("their standard deviation"),
        "reward/equal_group_fraction": Metric(
            "in GRPO, share of groups whose rewards are all equal: their advantages are 0"
        ),
        "reward/kl": Metric("in PPO, mean over completions of their log-ratio to the reference"),
        "reward/*": Metric("mean of one reward function, by its name, before its weight"),
        "eval/reward": Metric(
            "mean reward of greedy completions of the evaluation set",
            "max",
            "Mean reward",
            "evaluation",
            "sparse",
            "eval/reward",
        ),
        "warm_start/loss": Metric("loss of the last supervised step before the first rollout"),
    },
    "Prompts and completions": {
        "data/overlong_prompts": Metric(
            "training prompts that were too long, where `data.overlong_prompts` is not error"
        ),
        "completion/length_mean": Metric(
            "mean length, tokens",
            panel="Mean completion length, tokens",
            trl="train/completions/mean_length",
        ),
        "completion/length_max": Metric("longest, tokens"),
        "completion/cut_fraction": Metric("share that ended at the token limit"),
    },
    "Policy": {
        "loss": Metric("mean loss of the step's updates", panel="Loss"),
        "gradient_norm": Metric(
            "2-norm of the gradient before clipping, mean over updates",
            panel="Gradient norm",
            trl="train/grad_norm",
        ),
        "learning_rate": Metric("of the step's last update"),
        "policy/clip_fraction": Metric(
            "share of tokens whose ratio the loss clipped",
            panel="Clipped share of tokens",
            trl="train/clip_ratio/region_mean",
        ),
        "policy/entropy": Metric(
            "mean entropy at completion tokens, nats", panel="Entropy, nats", trl="train/entropy"
        ),
        "policy/balance": Metric(
            "mean load-balancing loss of a sequence, 1 where its experts are met equally often; "
            "where `algorithm.balance_coefficient` is set",
            panel="Load-balancing loss, mean over sequences",
            trl=None,
        ),
        "policy/ratio/min": Metric(
            "smallest new / old probability of all updates; 1 in a first one"
        ),
        "policy/ratio/mean": Metric("mean ratio"),
        "policy/ratio/max": Metric("largest ratio of all updates"),
        "policy/kl/rollout": Metric("mean of r - 1 - log r with r = new / old probability, nats"),
        "policy/kl/k1": Metric("mean of logprob - reference logprob, nats"),
        "policy/kl/k3": Metric(
            "mean of r - log r - 1, r = reference / policy, nats",
            panel="KL to the reference, nats",
            trl="train/kl",
        ),
    },
    "Critic, in PPO": {
        "value/mean": Metric("mean value of the rollout's tokens"),
        "value/explained_variance": Metric("1 - var(returns - values) / var(returns)"),
        "value/loss": Metric("mean loss of the critic's updates"),
        "value/clip_fraction": Metric("share of tokens whose value the loss clipped"),
        "value/gradient_norm": Metric("2-norm of the critic's gradient, mean over updates"),
    },
    "Consistency: training against rollout, on the first update": {
        **{f"consistency/{name}": text for name, text in (DRIFT | ROUTED).items()},
        f"consistency/{ABS_DIFF.name}/count/*": Metric(
            "tokens whose |training - rollout| is in this bin; in wandb a histogram of its log10"
        ),
        f"consistency/{RATIO.name}/count/*": Metric(
            "tokens whose r is in this bin; in wandb a histogram"
        ),
        "consistency/gradient_check/mismatched_elements": Metric(
            "gradient elements that differed under any of them", "max", CHECKS
        ),
        "consistency/gradient_check/passed": Metric(
            "whether gradients had the same bytes under other groupings of the batch", "min", CHECKS
        ),
        "consistency/critic_gradient_check/passed": Metric(
            "the same of the critic's gradients, under another micro-batch and padding", "min"
        ),
        "consistency/critic_gradient_check/mismatched_elements": Metric(
            "gradient elements of the critic that differed", "max"
        ),
        "consistency/value_check/values": Metric("critic's values computed again"),
        "consistency/value_check/mismatched_values": Metric(
            "of these, values that differ under another grouping, order and padding", "max"
        ),
        "consistency/schedule_audit": Metric(
            "sampled elements of library products that differed from ours, on a GPU", "max"
        ),
        "consistency/gradient_digest": Metric("SHA-256 of the digests of all gradients"),
        "consistency/critic_digest": Metric("digest of the critic's weights after the step"),
        "rollout/weights_digest": Metric("`model_digest` of the weights after the step"),
    },
    "Stock path on the same tokens, where `consistency.shadow_every` is set": {
        f"stock/{name}": _of_stock(name, metric) for name, metric in (DRIFT | ROUTED).items()
    },
    "Drift as other trainers define it, where `tracking.metrics_of` names them": {
        "sampling/sampling_logp_difference/mean": Metric("TRL: mean |training - rollout|"),
        "sampling/sampling_logp_difference/max": Metric("TRL: largest", "max"),
        "sampling/importance_sampling_ratio/min": Metric(
            "TRL: smallest product of a completion's r, 0 where it is over 3", "min"
        ),
        "sampling/importance_sampling_ratio/mean": Metric("TRL: their mean", "mean"),
        "sampling/importance_sampling_ratio/max": Metric("TRL: the largest", "max"),
        "training/rollout_probs_diff_valid": Metric("verl: 1, it was measured"),
        "training/rollout_probs_diff_max": Metric(
            "verl: largest |difference| of probabilities", "max"
        ),
        "training/rollout_probs_diff_mean": Metric("verl: their mean", "max"),
        "training/rollout_probs_diff_std": Metric("verl: their standard deviation", "max"),
        "training/rollout_actor_probs_pearson_corr": Metric(
            "verl: correlation of both sides' probabilities", "min"
        ),
        "rollout_corr/training_ppl": Metric("verl: mean perplexity of completions, training"),
        "rollout_corr/training_log_ppl": Metric("verl: mean of its logarithm"),
        "rollout_corr/kl": Metric("verl: mean of rollout - training logprob", "max"),
        "rollout_corr/k3_kl": Metric("verl: mean of r - log r - 1", "max"),
        "rollout_corr/rollout_ppl": Metric("verl: mean perplexity of completions, rollout"),
        "rollout_corr/rollout_log_ppl": Metric("verl: mean of its logarithm"),
        "rollout_corr/log_ppl_diff": Metric(
            "verl: mean over completions of mean logprob, rollout - training"
        ),
        "rollout_corr/log_ppl_abs_diff": Metric("verl: mean of its absolute value", "max"),
        "rollout_corr/log_ppl_diff_max": Metric("verl: its largest", "max"),
        "rollout_corr/log_ppl_diff_min": Metric("verl: its smallest", "min"),
        "rollout_corr/ppl_ratio": Metric("verl: mean of its exponential"),
        "rollout_corr/chi2_token": Metric("verl: mean of r squared, - 1", "max"),
        "rollout_corr/chi2_seq": Metric("verl: the same of the product of a completion's r", "max"),
        "mismatch_kl/all/mean": Metric("prime-rl: mean of r - log r - 1", "max"),
        "mismatch_kl/all/std": Metric("prime-rl: its standard deviation", "max"),
        "mismatch_kl/all/max": Metric("prime-rl: its largest", "max"),
        "train/token_mult_prob_error": Metric("NeMo-RL: mean of exp |difference|", "max"),
        "train/gen_kl_error": Metric("NeMo-RL: mean of r - 1 - log r", "max"),
        "train/policy_kl_error": Metric("NeMo-RL: the same of 1 / r", "max"),
        "train/js_divergence_error": Metric(
            "NeMo-RL: the same of both sides against their mixture", "max"
        ),
        "train/sampling_importance_ratio": Metric("NeMo-RL: mean r", "mean"),
    },
    "Speed": {
        "tokens_per_second": Metric(
            "completion tokens over the time of the whole step",
            "mean",
            "Tokens per second",
            "tokens sampled",
            trl=None,
        ),
        "time/step_seconds": Metric("the whole step", "mean"),
        "time/rollout_seconds": Metric("generation", "mean", SECONDS, "rollout", trl=None),
        "time/training_seconds": Metric(
            "passes, and sums over processes", "mean", SECONDS, "training", trl="train/step_time"
        ),
        "time/critic_seconds": Metric("the critic's values, passes and steps", "mean"),
        "time/optimizer_seconds": Metric("optimizer steps", "mean", SECONDS, "optimizer", trl=None),
        "time/digest_seconds": Metric("digests of tokens, gradients and weights", "mean"),
        "time/shadow_seconds": Metric("the stock path", "mean", SECONDS, "shadow", trl=None),
        "time/gradient_check_seconds": Metric(
            "the gradient check", "mean", SECONDS, "gradient check", trl=None
        ),
        "time/critic_gradient_check_seconds": Metric("that of the critic", "mean"),
        "time/value_check_seconds": Metric("the value check", "mean"),
        "time/rollout_tokens_per_second": Metric("completion tokens in generation", "mean"),
        "time/training_tokens_per_second": Metric("tokens, with prompts, in training", "mean"),
        "time/stock_rollout_tokens_per_second": Metric("the stock path's", "mean"),
        "time/stock_training_tokens_per_second": Metric("the stock path's", "mean"),
        "time/rollout_prefill_tokens_per_second": Metric("prompt tokens read", "mean"),
        "time/rollout_decode_tokens_per_second": Metric("completion tokens decoded", "mean"),
        "time/rollout_mean_seconds_to_first_token": Metric("of a sequence", "mean"),
        "time/rollout_host_seconds_per_step": Metric("host time of an engine step", "mean"),
        "time/rollout_peak_kv_share": Metric("largest share of cache blocks in use", "max"),
        "time/rollout_prefix_hit_tokens": Metric("prompt tokens taken from the cache"),
        "time/rollout_preemptions": Metric("sequences that gave their blocks back", "max"),
        "time/rollout_acceptance_rate": Metric("share of drafted tokens accepted", "mean"),
    },
}
"""Heading -> names."""


def all_metrics() -> Iterator[tuple[str, Metric]]:
    """All metrics by name, exact names before patterns."""
    found = [item for section in METRICS.values() for item in section.items()]
    yield from sorted(found, key=lambda item: "*" in item[0])


def metric_of(name: str) -> Metric:
    """What a logged metric is. A name that `METRICS` does not have is a KeyError."""
    for known, metric in all_metrics():
        if fnmatchcase(name, known):
            return metric
    raise KeyError(name)


class Curve(NamedTuple):
    """One metric of a panel."""

    key: str
    label: str
    look: Look


class Panel(NamedTuple):
    """One pair of axes; the metrics say which panel draws them."""

    title: str
    kind: Kind = "lines"
    unit: str = ""
    histogram: Histogram | None = None
    height: float = 2.1
    """Inches, in the report."""

    @property
    def curves(self) -> tuple[Curve, ...]:
        own = ((key, m) for key, m in all_metrics() if m.panel == self.title)
        found = [Curve(key, metric.label, metric.look) for key, metric in own]
        return tuple(sorted(found, key=lambda curve: LOOKS.index(curve.look)))

    @property
    def keys(self) -> tuple[str, ...]:
        """The metrics it needs, by their names in wandb."""
        if self.kind == "table":
            return (WORST_TOKENS,)
        if self.histogram is not None:
            return (self.histogram.wandb,)
        return tuple(curve.key for curve in self.curves)

    @property
    def trl_keys(self) -> tuple[str, ...]:
        """The same where `attach` is in a trainer of TRL."""
        if not self.curves:
            return self.keys
        named = ((key, metric_of(key).trl) for key in self.keys)
        return tuple(trl or f"train/{key}" for key, trl in named if trl is not None)


class Section(NamedTuple):
    """Panels under one heading."""

    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 1


DRIFT_SECTION = Section(
    "Drift",
    "Rollout logprobs against those that training recomputes, on the same tokens.",
    (
        Panel("Logprob difference", "difference", "|training − rollout|, nats", height=3.3),
        Panel("Tokens whose bits differ", "share"),
        Panel("Tokens by size of the difference", "histogram", histogram=ABS_DIFF, height=2.6),
    ),
)
EXPERTS = Section(
    "Mixture of experts",
    "Tokens whose experts differ between rollout and training, and the load-balancing loss.",
    (Panel(REROUTED), Panel("Load-balancing loss, mean over sequences")),
)
"""Panels of sparse models alone: see `sections`."""
WORST = Section(
    "Worst tokens",
    "The tokens whose logprobs differ most, of the run's first step with drift.",
    (Panel("Worst tokens", "table"),),
)
SECTIONS: tuple[Section, ...] = (
    DRIFT_SECTION,
    WORST,
    Section(
        "Ratio and KL",
        "The importance ratio of the first update, exp(training − rollout), and estimates of the "
        "KL between both sides.",
        (
            Panel("Importance ratio"),
            Panel(KL, unit="nats"),
            Panel("Tokens by ratio", "histogram", histogram=RATIO, height=2.8),
        ),
    ),
    Section("Reward", "Mean over the completions of a step.", (Panel("Mean reward", height=3.4),)),
    Section(
        "Learning",
        "Means over the step's tokens and updates.",
        (
            Panel("Loss"),
            Panel("Gradient norm"),
            Panel("Entropy, nats"),
            Panel("KL to the reference, nats"),
            Panel("Clipped share of tokens"),
            Panel("Mean completion length, tokens"),
        ),
        columns=2,
    ),
    Section(
        "Gradient checks",
        "The step's gradient recomputed under other groupings and compared as bytes.",
        (Panel(CHECKS, "checks", height=2.4),),
    ),
    Section(
        "Speed",
        "Where the seconds of a step go.",
        (Panel(SECONDS, "stacked", height=2.8), Panel("Tokens per second")),
    ),
)
"""What shows a run, on the HTML page and in wandb."""


def sections(*, of_experts: bool) -> tuple[Section, ...]:
    """What shows a run, of a sparse model or of a dense one."""
    return (DRIFT_SECTION, EXPERTS, *SECTIONS[1:]) if of_experts else SECTIONS
