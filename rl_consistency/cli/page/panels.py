"""The panels that show a run, as data: `report.html` and the page in wandb are drawn from them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rl_consistency.integrations.wandb_drift import HISTOGRAM_KEYS, WORST_TOKENS
from rl_consistency.parity.histograms import ABS_DIFF, RATIO, Histogram

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
            return (HISTOGRAM_KEYS[self.histogram],)
        return tuple(curve.key for curve in self.curves)


class Section(NamedTuple):
    """Panels under one heading."""

    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 1


DRIFT = Section(
    "Drift",
    "Rollout logprobs against those that training recomputes, on the same tokens.",
    (
        Panel(
            "Logprob difference",
            (
                Curve("stock/logprob_abs_diff/max", "stock, max", "stock"),
                Curve("stock/logprob_abs_diff/mean", "stock, mean", "mean"),
                Curve("consistency/logprob_abs_diff/max", "rl_consistency, max"),
            ),
            "difference",
            "|training − rollout|, nats",
            height=3.3,
        ),
        Panel(
            "Tokens whose bits differ",
            (
                Curve("stock/mismatch_fraction", "stock", "stock"),
                Curve("consistency/mismatch_fraction", "rl_consistency"),
            ),
            "share",
        ),
        Panel("Tokens by size of the difference", kind="histogram", histogram=ABS_DIFF, height=2.6),
    ),
)
EXPERTS = Section(
    "Mixture of experts",
    "Tokens whose experts differ between rollout and training, and the load-balancing loss.",
    (
        Panel(
            "Tokens that met other experts",
            (
                Curve("stock/rerouted_tokens", "stock", "stock"),
                Curve("consistency/rerouted_tokens", "rl_consistency"),
            ),
        ),
        Panel("Load-balancing loss, mean over sequences", (Curve("policy/balance"),)),
    ),
)
"""Panels of sparse models alone: see `sections`."""
WORST = Section(
    "Worst tokens",
    "The tokens whose logprobs differ most, of the run's first step with drift.",
    (Panel("Worst tokens", (Curve(WORST_TOKENS),), "table"),),
)
SECTIONS: tuple[Section, ...] = (
    DRIFT,
    WORST,
    Section(
        "Ratio and KL",
        "The importance ratio of the first update, exp(training − rollout), and estimates of the "
        "KL between both sides.",
        (
            Panel(
                "Importance ratio",
                (
                    Curve("consistency/importance_ratio/max", "max", "stock"),
                    Curve("consistency/importance_ratio/mean", "mean"),
                    Curve("consistency/importance_ratio/min", "min", "second"),
                ),
            ),
            Panel(
                "KL, rollout to training",
                (
                    Curve("consistency/kl/k3", "r − 1 − log r"),
                    Curve("consistency/kl/k1", "−log r", "second"),
                ),
                unit="nats",
            ),
            Panel("Tokens by ratio", kind="histogram", histogram=RATIO, height=2.8),
        ),
    ),
    Section(
        "Reward",
        "Mean over the completions of a step.",
        (
            Panel(
                "Mean reward",
                (
                    Curve("reward/mean", "training completions"),
                    Curve("eval/reward", "evaluation", "sparse"),
                ),
                height=3.4,
            ),
        ),
    ),
    Section(
        "Learning",
        "Means over the step's tokens and updates.",
        (
            Panel("Loss", (Curve("loss"),)),
            Panel("Gradient norm", (Curve("gradient_norm"),)),
            Panel("Entropy, nats", (Curve("policy/entropy"),)),
            Panel("KL to the reference, nats", (Curve("policy/kl/k3"),)),
            Panel("Clipped share of tokens", (Curve("policy/clip_fraction"),)),
            Panel("Mean completion length, tokens", (Curve("completion/length_mean"),)),
        ),
        columns=2,
    ),
    Section(
        "Gradient checks",
        "The step's gradient recomputed under other groupings and compared as bytes.",
        (
            Panel(
                "Gradient elements changed by regrouping the batch",
                (
                    Curve("consistency/gradient_check/mismatched_elements"),
                    Curve("consistency/gradient_check/passed"),
                ),
                "checks",
                height=2.4,
            ),
        ),
    ),
    Section(
        "Speed",
        "Where the seconds of a step go.",
        (
            Panel(
                "Seconds per step, by phase",
                (
                    Curve("time/rollout_seconds", "rollout"),
                    Curve("time/training_seconds", "training"),
                    Curve("time/optimizer_seconds", "optimizer"),
                    Curve("time/shadow_seconds", "shadow"),
                    Curve("time/gradient_check_seconds", "gradient check"),
                ),
                "stacked",
                height=2.8,
            ),
            Panel("Tokens per second", (Curve("tokens_per_second", "tokens sampled"),)),
        ),
    ),
)


def sections(*, of_experts: bool) -> tuple[Section, ...]:
    """What shows a run, of a sparse model or of a dense one."""
    return (DRIFT, EXPERTS, *SECTIONS[1:]) if of_experts else SECTIONS


OF_TRL: dict[str, str | None] = {
    "reward/mean": "train/reward",
    "eval/reward": "eval/reward",
    "gradient_norm": "train/grad_norm",
    "policy/entropy": "train/entropy",
    "policy/balance": None,
    "policy/kl/k3": "train/kl",
    "policy/clip_fraction": "train/clip_ratio/region_mean",
    "completion/length_mean": "train/completions/mean_length",
    "time/training_seconds": "train/step_time",
    **{key: None for key in ("time/rollout_seconds", "time/optimizer_seconds")},
    **{key: None for key in ("time/shadow_seconds", "time/gradient_check_seconds")},
    "tokens_per_second": None,
    **{key: key for key in (*HISTOGRAM_KEYS.values(), WORST_TOKENS)},
}
"""Metric -> its name in wandb where `attach` is in a trainer of TRL; None where TRL has none. All
others get the prefix "train/" of transformers."""


def trl_keys(panel: Panel) -> tuple[str, ...]:
    """The metrics of a panel by their names there."""
    named = (OF_TRL.get(key, f"train/{key}") for key in panel.keys)
    return tuple(key for key in named if key is not None and "stock/" not in key)
