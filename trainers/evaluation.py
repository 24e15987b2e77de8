"""What an evaluation set says of a policy: its mean reward, and how many of n samples solve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb
from statistics import fmean

from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.examples import keyed_integer
from rl_consistency.trainers.rewards import known


def sampling_of(config: RunConfig, name: str, step: int) -> SamplingParams:
    """How the evaluation set `name` is sampled after `step`: greedily, or with noise of its own,
    which is a function of run.seed, name and step."""
    sampling = config.eval_sampling
    if sampling.temperature == 0:
        return sampling
    seed = keyed_integer(config.run.seed, "evaluation", name, step) % 2**63
    return replace(sampling, seed=seed)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that one of `k` samples is correct, without bias, where `correct` of `n` are.

    Source: Chen et al., Evaluating Large Language Models Trained on Code (2107.03374), equation 1.
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluation_metrics(config: RunConfig, name: str, rewards: Sequence[float]) -> dict[str, float]:
    """Metrics of an evaluation set from the rewards of its samples, n of each example in turn; one
    without a reward (NaN) is not correct and enters no mean."""
    n, prefix = config.eval_sampling.n, f"eval/{name}/" if name else "eval/"
    metrics = {f"{prefix}reward": fmean(scored)} if (scored := known(rewards)) else {}
    passed = [reward >= config.training.eval_pass_reward for reward in rewards]
    groups = [sum(passed[first : first + n]) for first in range(0, len(passed), n)]
    for k in config.pass_at:
        metrics[f"{prefix}pass_at_{k}"] = fmean(pass_at_k(n, group, k) for group in groups)
    return metrics
