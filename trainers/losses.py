"""The typed batch that every loss reads, and the few numbers that shape the loss.

A batch is flat: one entry per *scored* token, sequence by sequence, positions ascending. It
holds no padding, so a loss has none to mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.reduction.sums import masked_sum, tree_sum
from rl_consistency.models.packing import from_host


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """The scored tokens of some sequences, in logical order.

    Every tensor is [N], N = ``sum(lengths)`` > 0, all on one device.

    Example: two completions, "7 7" and "9", rewarded 1 and 0, so that with
    Dr. GRPO their advantages are +0.5 and -0.5::

        TokenBatch(
            logprobs=tensor([-0.1, -0.2, -1.5], requires_grad=True),
            old_logprobs=tensor([-0.1, -0.2, -1.5]),
            advantages=tensor([0.5, 0.5, -0.5]),
            lengths=[2, 1],
        )

    Raises: TypeError on a dtype, ValueError on a shape or an empty batch.
    """

    logprobs: Tensor
    """fp32, log pi(token) under the weights being trained; differentiable."""
    old_logprobs: Tensor
    """fp32, log pi(token) under the weights that sampled the token (the behaviour policy)."""
    advantages: Tensor
    """fp32, in GRPO the advantage of the token's sequence (see `per_token`); in PPO per token."""
    lengths: list[int]
    """Scored tokens of each sequence; a sequence may have none."""
    reference_logprobs: Tensor | None = None
    """fp32, log pi(token) under the frozen reference policy; needed for a KL term."""
    entropy: Tensor | None = None
    """fp32, entropy of the distribution the token was drawn from, nats; for an entropy bonus."""

    def __post_init__(self) -> None:
        if (tokens := sum(self.lengths)) == 0:
            raise ValueError("a TokenBatch needs at least one scored token, got none; skip it")
        for name, value in vars(self).items():
            if not isinstance(value, Tensor):
                continue
            if value.dtype != torch.float32:
                raise TypeError(f"{name} must be {torch.float32}, got {value.dtype}")
            if value.shape != (tokens,):
                got = list(value.shape)
                raise ValueError(f"{name} must be [sum(lengths) = {tokens}], got {got}")


def per_token(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[S] values, one per sequence -> [N], each repeated for its sequence's tokens; any dtype.

    Example: ``per_token(tensor([0.5, -0.5]), [2, 1])`` is ``[0.5, 0.5, -0.5]``.
    """
    if values.shape != (len(lengths),):
        raise ValueError(f"expected {len(lengths)} values, got a tensor {list(values.shape)}")
    # An index from the host: a count of repeats on a GPU would have to be read back first.
    index = np.repeat(np.arange(len(lengths)), lengths)
    return values[from_host(index, values.device)]


WeightKind = Literal["grpo", "dr_grpo", "dapo"]
Surrogate = Literal["token", "sequence", "detached"]
LossKind = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]


class LossForm(NamedTuple):
    """What a loss of this name is made of, and the range of its clip where a recipe gives none."""

    weights: WeightKind
    surrogate: Surrogate = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2


LOSSES: Mapping[LossKind, LossForm] = {
    "grpo": LossForm("grpo"),
    "dr_grpo": LossForm("dr_grpo"),
    "dapo": LossForm("dapo"),
    "gspo": LossForm("grpo", "sequence", 3e-4, 4e-4),
    "cispo": LossForm("dapo", "detached", 1.0, 4.0),
}
"""Sources: DeepSeekMath (arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO
(2507.18071, whose section 5.1 has this range), CISPO (MiniMax-M1, 2506.13585; it has no lower bound
and names no upper one: 5 is that of ScaleRL, 2510.13786, and of TRL's documentation)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClippedLoss:
    """A loss and what it was made of. All per-token tensors are [N], detached."""

    loss: Tensor
    """fp32 scalar; differentiable unless it comes from `merge_outputs`."""
    terms: Tensor
    """fp32, weight * term of each token: what `loss` sums."""
    clipped: Tensor
    """bool, tokens whose surrogate or value is clipped and has no gradient; in CISPO those whose
    weight is clipped, which keep one."""

    def to(self, device: torch.device | str) -> Self:
        """This loss on another device, detached."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{n: v.detach().to(device) for n, v in values.items() if v is not None}
        )

    @property
    def clip_fraction(self) -> float:
        """Share of the tokens that are clipped."""
        return self.clipped.double().mean().item()


L = TypeVar("L", bound=ClippedLoss)


@dataclass(frozen=True, eq=False, kw_only=True)
class LossOutput(ClippedLoss):
    """The loss of a policy."""

    logprobs: Tensor
    """fp32, those of the batch."""
    ratio: Tensor
    """fp32, importance ratio exp(logprob - old_logprob); in GSPO that of the sequence."""
    kl_k1: Tensor | None = None
    """fp32, logprob - reference_logprob; None without a reference."""
    kl_k3: Tensor | None = None
    """fp32, exp(r) - r - 1 with r = reference_logprob - logprob; None without a reference."""
    entropy: Tensor | None = None
    """fp32, nats; None when the batch carries none."""
    balance: Tensor | None = None
    """[S] fp32, the load-balancing loss of each sequence; None without that term."""
    balance_terms: Tensor | None = None
    """[S] fp32, the same times its weight: what `loss` sums beside `terms`."""

    def metrics(self, prefix: str = "policy") -> dict[str, float]:
        """Loss, clip fraction, ratio, KL and entropy as unweighted means over tokens, in fp64."""
        found = {
            "clip_fraction": self.clip_fraction,
            "ratio/min": self.ratio.min().item(),
            "ratio/mean": self.ratio.double().mean().item(),
            "ratio/max": self.ratio.max().item(),
            "kl/rollout": (self.ratio.double() - 1.0 - self.ratio.double().log()).mean().item(),
        }
        optional = {"kl/k1": self.kl_k1, "kl/k3": self.kl_k3, "entropy": self.entropy}
        optional |= {"balance": self.balance}
        found |= {name: v.double().mean().item() for name, v in optional.items() if v is not None}
        return {"loss": self.loss.item()} | {f"{prefix}/{name}": v for name, v in found.items()}


def mean_metrics(updates: Sequence[LossOutput]) -> dict[str, float]:
    """The metrics of several updates: over all their tokens, and the mean of their losses."""
    losses = [update.loss.item() for update in updates]
    return merge_outputs(updates).metrics() | {"loss": fmean(losses)}


def token_weights(
    lengths: Sequence[int],
    kind: WeightKind,
    *,
    num_sequences_global: int,
    total_tokens: int,
    max_tokens: int,
    keep: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Weights [N] fp32 of the tokens of some sequences of these lengths, for a sum over tokens.

    grpo:    1 / (num_sequences_global * length)
    dr_grpo: 1 / (num_sequences_global * max_tokens)
    dapo:    1 / total_tokens

    The counts are those of the whole batch of an optimizer step, so that micro-batches add up.
    `keep` is bool [S], False for a dropped sequence, whose tokens get the weight 0; `total_tokens`
    may leave them out. ValueError where a count is less than these sequences need.
    """
    kept = lengths if keep is None else [n for n, k in zip(lengths, keep.tolist()) if k]
    too_few = num_sequences_global < len(lengths) or total_tokens < sum(kept)
    if too_few or max_tokens < max(lengths, default=0):
        counts = f"{num_sequences_global} sequences, {total_tokens} tokens, max_tokens {max_tokens}"
        raise ValueError(f"weights need counts of a whole batch; got {counts} for {lengths}")
    denominators = {
        "grpo": [num_sequences_global * length for length in lengths],
        "dr_grpo": [num_sequences_global * max_tokens for _ in lengths],
        "dapo": [total_tokens for _ in lengths],
    }
    weights = [1.0 / count if count else 0.0 for count in denominators[kind]]
    per_sequence = torch.tensor(weights, dtype=torch.float32, device=device)
    if keep is not None:
        per_sequence = torch.where(keep.to(device), per_sequence, torch.zeros_like(per_sequence))
    return per_token(per_sequence, lengths)


def policy_loss(
    batch: TokenBatch,
    weights: Tensor,
    *,
    surrogate: Surrogate = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
) -> LossOutput:
    """The clipped policy loss of the tokens of `batch`, weighted by `weights` ([N] fp32).

    token:    min(ratio * A, clip(ratio) * A), clip to [1 - clip_low, 1 + clip_high] (PPO, GRPO)
    sequence: the same with the ratio of the sequence, the exponential of the mean of the
              log-ratios of its tokens (GSPO, equation 7)
    detached: clip(ratio) * A * logprob, the clipped ratio without a gradient (CISPO, equation 4)

    The sum of a sequence's log-ratios has the order `row_reduction`; mean and exponential round
    once each, to fp32. Its gradient is that of GSPO's equation 10, given to each token as in
    equation 13: with advantages and weights that are equal within a sequence the two are one.

    A token at the very border is not clipped. The KL term is the k3 estimate of KL(policy ||
    reference), on-policy (not importance weighted), as in GRPO. A non-finite logprob gives a
    non-finite loss: nothing is replaced.

    Example: with DAPO's clip-higher, 0.28, a token with a positive advantage stops pushing once its
    ratio exceeds 1.28, one with a negative advantage once its ratio is under 0.8.

    Raises: ValueError on weights of another shape, or a coefficient without its tensor.
    """
    if weights.shape != batch.logprobs.shape or weights.dtype != torch.float32:
        expected, got = list(batch.logprobs.shape), f"{weights.dtype} {list(weights.shape)}"
        raise ValueError(f"weights must be fp32 {expected}, got {got}")
    log_ratio = batch.logprobs - batch.old_logprobs
    if surrogate == "sequence":
        # Its own value has a gradient at each token: none is added up over a sequence.
        mean = per_token(sequence_means(log_ratio.detach(), batch.lengths), batch.lengths)
        log_ratio = mean + (batch.logprobs - batch.logprobs.detach())
    ratio = torch.exp(log_ratio)
    advantages, low, high = batch.advantages, 1.0 - clip_low, 1.0 + clip_high
    bounded = ratio.detach().clamp(low, high)
    if surrogate == "detached":
        clipped = bounded != ratio.detach()
        term = -(bounded * advantages * batch.logprobs)
    else:
        # A selection rather than torch.minimum, whose gradient at a tie is split between its two
        # arguments: at ratio 1, the whole first update, every token is a tie.
        rises, falls = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
        clipped = (rises | falls).detach()
        term = -(torch.where(clipped, bounded, ratio) * advantages)
    kl_k1 = kl_k3 = None
    if batch.reference_logprobs is not None:
        to_policy = batch.reference_logprobs - batch.logprobs
        kl_k1, kl_k3 = -to_policy.detach(), torch.exp(to_policy) - to_policy - 1.0
    if kl_coefficient:
        term = term + kl_coefficient * _needed(kl_k3, "kl_coefficient", "reference_logprobs")
    if entropy_coefficient:
        entropy = _needed(batch.entropy, "entropy_coefficient", "entropy")
        term = term - entropy_coefficient * entropy
    weighted = weights * term
    return LossOutput(
        loss=masked_sum(weighted),
        terms=weighted.detach(),
        logprobs=batch.logprobs.detach(),
        ratio=ratio.detach(),
        clipped=clipped,
        kl_k1=kl_k1,
        kl_k3=None if kl_k3 is None else kl_k3.detach(),
        entropy=None if batch.entropy is None else batch.entropy.detach(),
    )


def sequence_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[N] fp32 -> [S], the mean over each sequence's tokens; 0 for a sequence without any.

    Each is a `tree_sum` of the sequence alone: zeros behind it change no pairwise sum.
    """
    count, ends = np.asarray(lengths)[:, None], np.cumsum(lengths)[:, None]
    place = np.arange(max(lengths))[None]
    index = np.where(place < count, ends - count + place, len(values))
    rows = torch.cat([values, values.new_zeros(1)])[from_host(index, values.device)]
    divisor = np.maximum(count[:, 0], 1).astype(np.float32)
    return tree_sum(rows) / from_host(divisor, values.device)


def with_balance(output: LossOutput, balance: Tensor, weight: float) -> LossOutput:
    """The output with the load-balancing losses of its sequences ([S] fp32) added to the loss.

    `weight` is the coefficient over the number of sequences of the global batch.
    """
    weighted = balance * weight
    return replace(
        output,
        loss=output.loss + masked_sum(weighted),
        balance=balance.detach(),
        balance_terms=weighted.detach(),
    )


def _needed(value: Tensor | None, coefficient: str, field: str) -> Tensor:
    if value is None:
        raise ValueError(f"{coefficient} is not 0 but the batch has no {field}; give it or set 0")
    return value


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None
) -> ClippedLoss:
    """Half the squared error of the values, [N] fp32 each; only `values` are differentiable.

    A value further than `clip` from the old one, the one that advantages were computed with, counts
    as one at that distance if the error is larger there: it then has no gradient. None never clips.

    Example: old value 0, clip 0.2, value 0.5. With a return of 1 the error is that of 0.2, half of
    0.64, without a gradient. With a return of -1 it is that of 0.5, half of 2.25.

    Raises: ValueError on shapes that differ.
    """
    if not values.shape == old_values.shape == returns.shape == weights.shape:
        shapes = [list(t.shape) for t in (values, old_values, returns, weights)]
        raise ValueError(f"values, old_values, returns and weights must have one shape: {shapes}")
    error, clipped = (values - returns).square(), torch.zeros_like(values, dtype=torch.bool)
    if clip is not None:
        moved = values.detach() - old_values
        bounded = (old_values + moved.clamp(-clip, clip) - returns).square()
        # By distance too: inside, rounding alone may make the bounded error the larger one.
        clipped = (moved.abs() > clip) & (bounded > error.detach())
        error = torch.where(clipped, bounded, error)
    weighted = weights * (0.5 * error)
    return ClippedLoss(loss=masked_sum(weighted), terms=weighted.detach(), clipped=clipped)


def merge_outputs(outputs: Sequence[L]) -> L:
    """The output of the whole batch from those of its micro-batches, given in logical order.

    The loss is summed once over all tokens: the same bits for every cut. It is not differentiable.
    """

    def joined(name: str) -> Tensor | None:
        parts = [part for part in (getattr(o, name) for o in outputs) if part is not None]
        return torch.cat(parts) if parts else None

    names = [field.name for field in fields(outputs[0]) if field.name != "loss"]
    parts = {name: joined(name) for name in names}
    summed = (parts["terms"], parts.get("balance_terms"))
    loss = torch.stack([masked_sum(part) for part in summed if part is not None]).sum()
    return type(outputs[0])(loss=loss, **parts)  # type: ignore[arg-type]
