"""The sections `warm_start`, `algorithm`, `optimizer` and `training`."""

from __future__ import annotations

from typing import Literal

from rl_consistency.trainers.advantages import AdvantageKind
from rl_consistency.trainers.config.section import (
    BelowOne,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Section,
)
from rl_consistency.trainers.losses import WeightKind


class WarmStartSection(Section):
    """Supervised steps on the reference completions, before reinforcement learning."""

    steps: CountOrZero = 0
    """Number of supervised steps; 0 = none."""
    batch_size: Count = 32
    """Examples per step."""
    learning_rate: Positive = 1e-3
    """Learning rate of these steps."""


class AlgorithmSection(Section):
    """What is optimised."""

    advantage: AdvantageKind = "grpo"
    """grpo: centred by group mean, scaled by group deviation; dr_grpo: centred only."""
    loss: WeightKind = "grpo"
    """grpo: mean over sequences of token means; dr_grpo: constant length; dapo: token mean."""
    clip_low: BelowOne = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveOrZero = 0.2
    """And above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    kl_coefficient: PositiveOrZero = 0.0
    """Weight of the k3 estimate of the KL to the initial policy; 0 keeps no reference model."""
    entropy_coefficient: PositiveOrZero = 0.0
    """Weight of the entropy bonus."""
    updates_per_rollout: Count = 1
    """Optimizer steps per epoch over a rollout batch, which is split into as many equal parts."""
    epochs_per_rollout: Count = 1
    """Passes over each rollout batch."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Completions cut at max_tokens: kept, given no weight in the loss (they still count in its
    denominators and in the group's mean), or penalised by length."""
    overlong_buffer: CountOrZero = 0
    """Tokens before max_tokens over which the penalty grows; only with overlong: penalty."""


class OptimizerSection(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: Positive
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: PositiveOrZero = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; null = no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine end at 0."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises from 0."""


StrategyName = Literal["replicated", "fsdp2", "zero1", "zero2", "zero3"]


class TrainingSection(Section):
    """The loop."""

    steps: Count
    """Rollout batches."""
    micro_batch_size: Count = 8
    """Completions per forward and backward pass; changes memory and time, not bits."""
    strategy: StrategyName = "replicated"
    """How several processes share the policy. replicated: each holds all of it; fsdp2: each holds
    a shard of weights, moments and gradients."""
    layout: Literal["packed", "padded"] = "packed"
    """How sequences share a call: end to end, or padded to the longest; the same bits."""
    eval_every: CountOrZero = 0
    """Evaluate every this many steps; 0 = never."""
    eval_samples: Count | None = None
    """Evaluation examples used, one greedy completion each; null = all."""
    save_every: CountOrZero = 0
    """Write a checkpoint every this many steps; 0 = only at the end."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay."""
