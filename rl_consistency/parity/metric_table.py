"""Every metric of a run, once: what it means, which value stands for the run, where it is shown.

The metrics file, wandb, its dashboard, the HTML page and `docs/metrics.md` are made of this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from rl_consistency.parity.histograms import ABS_DIFF, RATIO, Histogram

WORST_TOKENS = "consistency/worst_tokens"
"""wandb's name of the table of worst tokens."""


class Metric(NamedTuple):
    """One metric, or all whose names fit a pattern with `*`."""

    text: str
    standing: str
    """Which value stands for the run: last, mean, or the worst (min, max) of what must not be."""


def _table(text: str, prefix: str = "") -> dict[str, Metric]:
    """Rows of name, standing and text; an indented line goes on with the text above it."""
    rows = (row.split(maxsplit=2) for row in text.strip().replace("\n    ", " ").splitlines())
    return {f"{prefix}{name}": Metric(meaning, standing) for name, standing, meaning in rows}


_DRIFT = """
tokens  last  completion tokens compared
mismatched_tokens  max  of these, tokens whose two logprobs differ in any bit
mismatch_fraction  max  their share
nonfinite_tokens  max  tokens with a NaN or an infinity on a side
logprob_abs_diff/mean  max  mean of |training - rollout|, nats
logprob_abs_diff/max  max  largest |training - rollout|, nats
ulp/mean  max  mean distance in units in the last place of fp32
ulp/max  max  largest such distance
kl/k1  max  mean of rollout - training logprob, nats
kl/k3  max  mean of r - 1 - log r with r = exp(training - rollout), nats
importance_ratio/min  min  smallest r
importance_ratio/mean  mean  mean r
importance_ratio/max  max  largest r
clip_fraction  max  share of tokens with r outside [0.8, 1.2]
rerouted_tokens  max  in a mixture of experts, tokens whose experts differ in some layer
"""
"""Of a comparison of logprobs, below a prefix that says whose; the last in sparse models alone."""

METRICS: Mapping[str, Mapping[str, Metric]] = {
    "Reward": _table("""
reward/mean  last  mean reward of the step's completions
reward/std  last  their standard deviation
reward/equal_group_fraction  last  in GRPO, share of groups whose rewards are all equal: their
    advantages are 0
reward/kl  last  mean over completions of their log-ratio to the reference, where the KL is part of
    the reward
reward/*  last  mean of one reward function, by its name, before its weight
dynamic_sampling/rounds  last  rollout batches drawn for the step, where
    `algorithm.dynamic_sampling` is set
dynamic_sampling/dropped_groups  last  groups of equal rewards among them that were left out
dynamic_sampling/filled_groups  last  such groups that the step was filled up with after the last
    round
dynamic_sampling/reward_mean  last  mean reward of all completions drawn
eval/reward  max  mean reward of the evaluation set's completions, greedy ones unless
    `training.eval_sampling` says otherwise; without an unnamed set the mean over the named ones
eval/*  max  pass_at_K: share of the set's examples that one of K completions solves, without bias;
    NAME/reward and NAME/pass_at_K: of the set NAME of `data.eval_sets`
warm_start/loss  last  loss of the last supervised step before the first rollout
"""),
    "Prompts and completions": _table("""
data/overlong_prompts  last  training prompts that were too long, where `data.overlong_prompts` is
    not error
completion/length_mean  last  mean length, tokens
completion/length_max  last  longest, tokens
completion/cut_fraction  last  share that ended at the token limit
"""),
    "Policy": _table("""
loss  last  mean loss of the step's updates
gradient_norm  last  2-norm of the gradient before clipping, mean over updates
learning_rate  last  of the step's last update
policy/clip_fraction  last  share of the tokens of all updates whose ratio the loss clipped, with
    cispo whose weight; means below are over these tokens too
policy/entropy  last  mean entropy at completion tokens, nats
policy/balance  last  mean load-balancing loss of a sequence, 1 where its experts are met equally
    often; where `algorithm.balance_coefficient` is set
policy/skipped_updates  last  updates whose completions were all cut and are masked, which moved
    nothing; where `algorithm.overlong` masks
policy/ratio/min  last  smallest new / old probability of all updates, with gspo of a sequence (the
    geometric mean over its tokens); 1 in a first one
policy/ratio/mean  last  mean ratio
policy/ratio/max  last  largest ratio of all updates
policy/kl/rollout  last  mean of r - 1 - log r with r = new / old probability, nats
policy/kl/k1  last  mean of logprob - reference logprob, nats
policy/kl/k3  last  mean of r - log r - 1, r = reference / policy, nats
"""),
    "Critic, in PPO": _table("""
value/mean  last  mean value of the rollout's tokens
value/explained_variance  last  1 - var(returns - values) / var(returns)
value/loss  last  mean loss of the critic's updates
value/clip_fraction  last  share of the tokens of all updates whose value the loss clipped
value/gradient_norm  last  2-norm of the critic's gradient, mean over updates
"""),
    "Consistency: training against rollout, on the first update": {
        **_table(_DRIFT, "consistency/"),
        **_table(
            """
logprob_abs_diff/count/*  last  tokens whose |training - rollout| is in this bin; in wandb a
    histogram of its log10
importance_ratio/count/*  last  tokens whose r is in this bin; in wandb a histogram
gradient_check/mismatched_elements  max  gradient elements that differed, added over these groupings
gradient_check/passed  min  whether gradients had the same bytes under other groupings of the
    batch
gradient_check/without_gradient  max  whether all of them were zero, so that nothing was checked
    and nothing passed
critic_gradient_check/passed  min  the same of the critic's gradients, under another micro-batch
    and padding
critic_gradient_check/without_gradient  max  whether all of these were zero
critic_gradient_check/mismatched_elements  max  gradient elements of the critic that differed
value_check/values  last  critic's values computed again
value_check/mismatched_values  max  of these, values that differ under another grouping, order and
    padding
schedule_audit  max  sampled elements of library products that differed from ours, on a GPU
gradient_digest  last  SHA-256 of the digests of all gradients
critic_digest  last  digest of the critic's weights after the step
""",
            "consistency/",
        ),
        **_table("rollout/weights_digest  last  `model_digest` of the weights after the step"),
    },
    "Stock path on the same tokens, where `consistency.shadow_every` is set": _table(
        f"""{_DRIFT}logprob_abs_diff/count/*  last  its tokens in this bin
importance_ratio/count/*  last  its tokens in this bin
""",
        "stock/",
    ),
    "Drift as other trainers define it, where `tracking.metrics_of` names them": _table("""
sampling/sampling_logp_difference/mean  last  TRL: mean |training - rollout|
sampling/sampling_logp_difference/max  max  TRL: largest
sampling/importance_sampling_ratio/min  min  TRL: smallest product of a completion's r, 0 where it
    is over 3
sampling/importance_sampling_ratio/mean  mean  TRL: their mean
sampling/importance_sampling_ratio/max  max  TRL: the largest
training/rollout_probs_diff_valid  last  verl: 1, it was measured
training/rollout_probs_diff_max  max  verl: largest |difference| of probabilities
training/rollout_probs_diff_mean  max  verl: their mean
training/rollout_probs_diff_std  max  verl: their standard deviation
training/rollout_actor_probs_pearson_corr  min  verl: correlation of both sides' probabilities
rollout_corr/training_ppl  last  verl: mean perplexity of completions, training
rollout_corr/training_log_ppl  last  verl: mean of its logarithm
rollout_corr/kl  max  verl: mean of rollout - training logprob
rollout_corr/k3_kl  max  verl: mean of r - log r - 1
rollout_corr/rollout_ppl  last  verl: mean perplexity of completions, rollout
rollout_corr/rollout_log_ppl  last  verl: mean of its logarithm
rollout_corr/log_ppl_diff  last  verl: mean over completions of mean logprob, rollout - training
rollout_corr/log_ppl_abs_diff  max  verl: mean of its absolute value
rollout_corr/log_ppl_diff_max  max  verl: its largest
rollout_corr/log_ppl_diff_min  min  verl: its smallest
rollout_corr/ppl_ratio  last  verl: mean of its exponential
rollout_corr/chi2_token  max  verl: mean of r squared, - 1
rollout_corr/chi2_seq  max  verl: the same of the product of a completion's r
mismatch_kl/all/mean  max  prime-rl: mean of r - log r - 1
mismatch_kl/all/std  max  prime-rl: its standard deviation
mismatch_kl/all/max  max  prime-rl: its largest
train/token_mult_prob_error  max  NeMo-RL: mean of exp |difference|
train/gen_kl_error  max  NeMo-RL: mean of r - 1 - log r
train/policy_kl_error  max  NeMo-RL: the same of 1 / r
train/js_divergence_error  max  NeMo-RL: the same of both sides against their mixture
train/sampling_importance_ratio  mean  NeMo-RL: mean r
"""),
    "Speed": _table("""
tokens_per_second  mean  completion tokens over the time of the whole step
time/step_seconds  mean  the whole step
time/rollout_seconds  mean  generation
time/training_seconds  mean  passes, and sums over processes
time/critic_seconds  mean  the critic's values, passes and steps
time/optimizer_seconds  mean  optimizer steps
time/digest_seconds  mean  digests of tokens, gradients and weights
time/shadow_seconds  mean  the stock path
time/gradient_check_seconds  mean  the gradient check
time/critic_gradient_check_seconds  mean  that of the critic
time/value_check_seconds  mean  the value check
time/rollout_tokens_per_second  mean  completion tokens in generation
time/training_tokens_per_second  mean  tokens, with prompts, in training
time/stock_rollout_tokens_per_second  mean  the stock path's
time/stock_training_tokens_per_second  mean  the stock path's
time/rollout_prefill_tokens_per_second  mean  prompt tokens read
time/rollout_decode_tokens_per_second  mean  completion tokens decoded
time/rollout_mean_seconds_to_first_token  mean  of a sequence
time/rollout_host_seconds_per_step  mean  host time of an engine step
time/rollout_peak_kv_share  max  largest share of cache blocks in use
time/rollout_prefix_hit_tokens  last  prompt tokens taken from the cache
time/rollout_preemptions  max  sequences that gave their blocks back
time/rollout_acceptance_rate  mean  share of drafted tokens accepted
"""),
}
"""Heading -> names."""


def all_metrics() -> Iterator[tuple[str, Metric]]:
    """All metrics by name, exact names before patterns."""
    found = [item for section in METRICS.values() for item in section.items()]
    yield from sorted(found, key=lambda item: "*" in item[0])


_TRL = {
    "loss": "train/loss",
    "reward/mean": "train/reward",
    "eval/reward": "eval/reward",
    "gradient_norm": "train/grad_norm",
    "policy/entropy": "train/entropy",
    "policy/kl/k3": "train/kl",
    "policy/clip_fraction": "train/clip_ratio/region_mean",
    "completion/length_mean": "train/completions/mean_length",
    "time/training_seconds": "train/step_time",
}
"""What wandb has of these where `attach` is in a trainer of TRL. `consistency/...` has the prefix
"train/" of transformers there, and others are missing."""

Kind = Literal["lines", "difference", "share", "checks", "stacked", "histogram", "table"]
"""`lines`: curves over the steps. `difference`: on a logarithmic axis with a place for zero.
`share`: in percent. `checks`: points, each passed or failed. `stacked`: seconds, added up.
`histogram`: tokens by step and bin. `table`: the worst tokens of a step."""


class Curve(NamedTuple):
    """One metric of a panel."""

    key: str
    label: str = ""
    look: Literal["ours", "stock", "mean", "second", "sparse"] = "ours"


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    curves: tuple[Curve, ...] = ()
    kind: Kind = "lines"
    unit: str = ""
    histogram: Histogram | None = None
    height: float = 2.1
    """Inches, in the report."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The metrics it needs, by their names in wandb."""
        if self.histogram is not None:
            return self.histogram.wandb, self.histogram.of_stock.wandb
        return (WORST_TOKENS,) if self.kind == "table" else tuple(c.key for c in self.curves)

    @property
    def trl_keys(self) -> tuple[str, ...]:
        """The same where `attach` is in a trainer of TRL."""
        if not self.curves:
            return self.keys[:1]
        named = {**_TRL, **{k: f"train/{k}" for k in self.keys if k.startswith("consistency/")}}
        return tuple(named[key] for key in self.keys if key in named)


class Section(NamedTuple):
    """Panels under one heading."""

    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 1


def _panel(title: str, *curves: Curve, **options: Any) -> Panel:
    return Panel(title, curves, **options)


def _section(title: str, caption: str, *panels: Panel, columns: int = 1) -> Section:
    return Section(title, caption, panels, columns)


DRIFT_SECTION = _section(
    "Drift",
    "Rollout logprobs against those that training recomputes, on the same tokens.",
    _panel(
        "Logprob difference",
        Curve("stock/logprob_abs_diff/max", "stock, max", "stock"),
        Curve("stock/logprob_abs_diff/mean", "stock, mean", "mean"),
        Curve("consistency/logprob_abs_diff/max", "rl_consistency, max"),
        kind="difference",
        unit="|training − rollout|, nats",
        height=3.3,
    ),
    _panel(
        "Tokens whose bits differ",
        Curve("stock/mismatch_fraction", "stock", "stock"),
        Curve("consistency/mismatch_fraction", "rl_consistency"),
        kind="share",
    ),
    _panel("Tokens by size of the difference", kind="histogram", histogram=ABS_DIFF, height=2.6),
)
EXPERTS = _section(
    "Mixture of experts",
    "Tokens whose experts differ between rollout and training, and the load-balancing loss.",
    _panel(
        "Tokens that met other experts",
        Curve("stock/rerouted_tokens", "stock", "stock"),
        Curve("consistency/rerouted_tokens", "rl_consistency"),
    ),
    _panel("Load-balancing loss, mean over sequences", Curve("policy/balance")),
)
"""Panels of sparse models alone: see `sections`."""
WORST = _section(
    "Worst tokens",
    "The tokens whose logprobs differ most, of the run's first step with drift.",
    _panel("Worst tokens", kind="table"),
)
SECTIONS: tuple[Section, ...] = (
    DRIFT_SECTION,
    WORST,
    _section(
        "Ratio and KL",
        "The importance ratio of the first update, exp(training − rollout), and estimates of the "
        "KL between both sides: 1 and 0 here, beside those of the stock path on the same tokens.",
        _panel(
            "Importance ratio",
            Curve("stock/importance_ratio/max", "stock, max", "stock"),
            Curve("stock/importance_ratio/min", "stock, min", "stock"),
            Curve("consistency/importance_ratio/max", "max"),
            Curve("consistency/importance_ratio/mean", "mean", "mean"),
            Curve("consistency/importance_ratio/min", "min", "second"),
        ),
        _panel(
            "KL, rollout to training",
            Curve("stock/kl/k3", "stock, r − 1 − log r", "stock"),
            Curve("consistency/kl/k3", "r − 1 − log r"),
            Curve("consistency/kl/k1", "−log r", "second"),
            unit="nats",
        ),
        _panel("Tokens by ratio", kind="histogram", histogram=RATIO, height=2.8),
    ),
    _section(
        "Reward",
        "Mean over the completions of a step.",
        _panel(
            "Mean reward",
            Curve("reward/mean", "training completions"),
            Curve("eval/reward", "evaluation", "sparse"),
            height=3.4,
        ),
    ),
    _section(
        "Learning",
        "Means over the step's tokens and updates.",
        _panel("Loss", Curve("loss")),
        _panel("Gradient norm", Curve("gradient_norm")),
        _panel("Entropy, nats", Curve("policy/entropy")),
        _panel("KL to the reference, nats", Curve("policy/kl/k3")),
        _panel("Clipped share of tokens", Curve("policy/clip_fraction")),
        _panel("Mean completion length, tokens", Curve("completion/length_mean")),
        columns=2,
    ),
    _section(
        "Gradient checks",
        "The step's gradient recomputed under other groupings and compared as bytes.",
        _panel(
            "Gradient elements changed by regrouping the batch",
            Curve("consistency/gradient_check/mismatched_elements"),
            Curve("consistency/gradient_check/passed"),
            kind="checks",
            height=2.4,
        ),
    ),
    _section(
        "Speed",
        "Where the seconds of a step go.",
        _panel(
            "Seconds per step, by phase",
            Curve("time/rollout_seconds", "rollout"),
            Curve("time/training_seconds", "training"),
            Curve("time/optimizer_seconds", "optimizer"),
            Curve("time/shadow_seconds", "shadow"),
            Curve("time/gradient_check_seconds", "gradient check"),
            kind="stacked",
            height=2.8,
        ),
        _panel("Tokens per second", Curve("tokens_per_second", "tokens sampled")),
    ),
)
"""What shows a run, on the HTML page and in wandb."""


def sections(*, of_experts: bool) -> tuple[Section, ...]:
    """What shows a run, of a sparse model or of a dense one."""
    return (DRIFT_SECTION, EXPERTS, *SECTIONS[1:]) if of_experts else SECTIONS
