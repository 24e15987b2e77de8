"""How far the logprobs of training are from those of the rollout, token by token.

A token matches when the two fp32 values are the same 32 finite bits; +0 and -0 differ, by 1 ULP.
Nothing that was scored is left out of any figure: a single NaN makes the means NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_consistency.parity.bytes import bits

LogProbs = Tensor | Sequence[Tensor]
Given = LogProbs | Sequence[float] | Sequence[Sequence[float]]
"""What callers have: also lists of numbers, as other engines give them."""

RATIO_BAND = (0.8, 1.2)
"""An importance ratio outside this band counts towards the clip fraction."""

OTHER_SAMPLING = (
    "the sides have other sampling parameters (temperature, top_k, top_p, min_p): give "
    "token_logprobs the rollout's with sampling=; else their weights differ"
)

FIGURES = {
    **{n: n for n in ("tokens", "mismatched_tokens", "mismatch_fraction", "nonfinite_tokens")},
    **{"logprob_abs_diff/mean": "mean_abs_diff", "logprob_abs_diff/max": "max_abs_diff"},
    **{"ulp/mean": "mean_ulp", "ulp/max": "max_ulp", "kl/k1": "kl_k1", "kl/k3": "kl_k3"},
    **{f"importance_ratio/{which}": f"ratio_{which}" for which in ("min", "mean", "max")},
    "clip_fraction": "clip_fraction",
}
"""Name of a metric, below a prefix -> what it is in a `DriftReport`."""


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """Drift over the active tokens, d = training logprob - rollout logprob, means in fp64."""

    tokens: int
    """Active tokens compared."""
    mismatched_tokens: int
    """Tokens whose bits differ, or that are not finite on either side."""
    nonfinite_tokens: int
    """Tokens with a NaN or an infinity on either side; all are mismatched too."""
    mean_abs_diff: float
    """Mean |d|, nats."""
    max_abs_diff: float
    """Largest |d|, nats."""
    mean_ulp: float
    max_ulp: int
    """Largest distance in representable fp32 values; 0 only when all bits are equal."""
    kl_k1: float
    """Mean of -d: the plain estimate of KL(rollout || training) from the rollout's samples."""
    kl_k3: float
    """Mean of e^d - 1 - d: the non-negative, low-variance estimate of the same."""
    ratio_min: float
    """Smallest importance ratio e^d."""
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    """Share of tokens whose ratio is outside [0.8, 1.2]."""
    first_mismatch: int | None
    """Flat index, counted over active and masked positions alike, of the first mismatched token."""
    positions: int
    """Values on each side, active or not."""
    rerouted_tokens: int | None = None
    """Tokens whose rows met other experts in some layer; None in a dense model, and where routing
    was not recorded."""
    likely_cause: str | None = None
    """What the differences look like, where they do: see `_looks_like_sampling`."""

    @property
    def mismatch_fraction(self) -> float:
        return self.mismatched_tokens / self.tokens

    @property
    def passed(self) -> bool:
        bad = self.mismatched_tokens, self.nonfinite_tokens, self.rerouted_tokens or 0
        return not any(bad)

    def metrics(self, prefix: str = "consistency") -> dict[str, float]:
        """The figures under the names they are logged by."""
        found = {f"{prefix}/{name}": getattr(self, figure) for name, figure in FIGURES.items()}
        if self.rerouted_tokens is not None:
            found[f"{prefix}/rerouted_tokens"] = self.rerouted_tokens
        return found

    def sentence(self) -> str:
        """What is said of a mismatch, without a full stop."""
        rerouted = f", {self.rerouted_tokens} met other experts" if self.rerouted_tokens else ""
        return (
            f"{self.mismatched_tokens} of {self.tokens} tokens have other logprobs in training "
            f"than in rollout (largest difference {self.max_abs_diff:g}, {self.max_ulp} ULP, "
            f"{self.nonfinite_tokens} not finite{rerouted})"
            f"{f'; likely cause: {self.likely_cause}' if self.likely_cause else ''}"
        )

    def merge(self, other: DriftReport) -> DriftReport:
        """The report of this report's tokens followed by the other's; means weighted by tokens.

        Experts count as looked at where both reports did. Where one did, those that differ stay
        counted, so no report that failed passes.
        """
        a, b = asdict(self), asdict(other)
        tokens = self.tokens + other.tokens
        merged: dict[str, Any] = {}
        for name in ("tokens", "mismatched_tokens", "nonfinite_tokens", "positions"):
            merged[name] = a[name] + b[name]
        for name in ("mean_abs_diff", "mean_ulp", "kl_k1", "kl_k3", "ratio_mean", "clip_fraction"):
            merged[name] = (a[name] * self.tokens + b[name] * other.tokens) / tokens
        for name in ("max_abs_diff", "max_ulp", "ratio_max"):
            merged[name] = _extreme(max, a[name], b[name])
        merged["ratio_min"] = _extreme(min, self.ratio_min, other.ratio_min)
        merged["first_mismatch"] = self.first_mismatch
        if self.first_mismatch is None and other.first_mismatch is not None:
            merged["first_mismatch"] = self.positions + other.first_mismatch
        rerouted = [n for n in (self.rerouted_tokens, other.rerouted_tokens) if n is not None]
        if len(rerouted) == 2 or any(rerouted):
            merged["rerouted_tokens"] = sum(rerouted)
        merged["likely_cause"] = self.likely_cause or other.likely_cause
        return DriftReport(**merged)


def _extreme(choose, a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)


def compare_logprobs(
    rollout: Given,
    training: Given,
    mask: Given | None = None,
    *,
    routing: tuple[LogProbs | None, LogProbs | None] | None = None,
) -> DriftReport:
    """Compare the logprobs of the same tokens from both sides.

    Args:
        rollout: fp32, any shape, or one tensor per sequence (joined in order); or a list of floats,
            or one per sequence, each rounded to fp32, which is what engines have made it of.
        training: the same tokens in the same order; shapes, or lengths per sequence, must agree.
        mask: bool or integer, shaped like the logprobs; 0 leaves a position out. None: all count.
        routing: of both sides, the tokens' fingerprints of the experts they met, shaped like the
            logprobs (`Completion.routing`, `TokenLogprobs.routing`); None, or None of both sides
            as in a dense model, does not compare them.

    Raises:
        ValueError: shapes differ, no token is active, or one side alone has routing.
        TypeError: a logprob is not fp32 (the type both sides produce), or a mask is not integral.
    """
    rollout, training = _tensors(rollout, torch.float32), _tensors(training, torch.float32)
    ours, theirs = _sides(rollout, training)
    active = torch.ones_like(ours, dtype=torch.bool)
    if mask is not None:
        active = _like(rollout, _tensors(mask), "mask")
        if active.dtype.is_floating_point or active.dtype.is_complex:
            raise TypeError(f"the mask must be bool or integer, got {active.dtype}")
    index = active.nonzero().squeeze(1)
    if index.numel() == 0:
        raise ValueError(
            f"no active token among {ours.numel()} positions: there is nothing to compare. Check "
            "the loss mask, and that the completions are not all empty"
        )
    if routing is not None and (isinstance(routing, Tensor) or len(routing) != 2):
        raise ValueError("routing is a pair: that of the rollout, and that of training")
    met = [
        None if found is None else _like(rollout, found, f"{side}'s routing")[index]
        for side, found in zip(("rollout", "training"), routing or (None, None), strict=True)
    ]
    report = _report(ours[index], theirs[index], index, positions=ours.numel())
    if met[0] is not None and met[1] is not None:
        return replace(report, rerouted_tokens=int((met[0] != met[1]).sum()))
    if met[0] is not met[1]:
        raise ValueError(
            f"only the {'rollout' if met[1] is None else 'training'} has routing; give that of "
            "both sides, or of neither where the model is dense"
        )
    return report


def mismatched_sequences(rollout: Sequence[Tensor], training: Sequence[Tensor]) -> list[int]:
    """Indices of the sequences with at least one mismatched token; one fp32 tensor per sequence."""
    each = _mismatched(*_sides(rollout, training)).split([part.numel() for part in rollout])
    return [i for i, found in enumerate(each) if bool(found.any())]


class Sample(NamedTuple):
    """A completion, or a turn of one, as both sides scored it."""

    tokens: Sequence[int]
    place: tuple[int, int]
    """Prompt id, and which completion of that prompt."""
    rollout: Tensor  # [tokens] fp32
    training: Tensor  # [tokens] fp32


class WorstToken(NamedTuple):
    """One token that differs; a row of a table."""

    token: str
    prompt_id: int
    sample: int
    """Which completion of its prompt."""
    position: int
    """Place of the token in the completion, counted from 0."""
    rollout_logprob: float
    training_logprob: float
    difference: float
    """training - rollout, nats."""


def worst_tokens(
    samples: Sequence[Sample], decode: Callable[[list[int]], str], *, most: int = 50
) -> list[WorstToken]:
    """The tokens that do not match, the largest |difference| first, what is not finite before it.

    `decode` gives the text of token ids.
    """
    found: list[tuple[float, int, int]] = []
    for index, sample in enumerate(samples):
        ours, theirs = (side.detach().float().cpu() for side in sample[2:])
        size = (theirs.double() - ours.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        at = _mismatched(ours, theirs).nonzero().squeeze(1)
        largest = at[torch.argsort(size[at], descending=True, stable=True)[:most]]
        found += [(-float(size[i]), index, int(i)) for i in largest]
    rows = []
    for _, index, position in sorted(found)[:most]:
        tokens, place, *sides = samples[index]
        ours, theirs = (float(side[position]) for side in sides)
        token = decode([tokens[position]])
        rows.append(WorstToken(token, *place, position, ours, theirs, theirs - ours))
    return rows


def _mismatched(rollout: Tensor, training: Tensor) -> Tensor:
    """bool, where two fp32 values are not the same finite bits."""
    return (bits(rollout) != bits(training)) | ~(rollout.isfinite() & training.isfinite())


def _report(rollout: Tensor, training: Tensor, index: Tensor, positions: int) -> DriftReport:
    d = training.double() - rollout.double()
    ratio = d.exp()
    ulp = (ordered_integers(training) - ordered_integers(rollout)).abs()
    nonfinite = ~(rollout.isfinite() & training.isfinite())
    mismatched = _mismatched(rollout, training)
    outside = ~((ratio >= RATIO_BAND[0]) & (ratio <= RATIO_BAND[1]))
    first = index[mismatched][:1].tolist()
    return DriftReport(
        tokens=d.numel(),
        mismatched_tokens=int(mismatched.sum()),
        nonfinite_tokens=int(nonfinite.sum()),
        mean_abs_diff=d.abs().mean().item(),
        max_abs_diff=d.abs().max().item(),
        mean_ulp=ulp.double().mean().item(),
        max_ulp=int(ulp.max()),
        kl_k1=(-d).mean().item(),
        kl_k3=(torch.expm1(d) - d).mean().item(),
        ratio_min=ratio.min().item(),
        ratio_mean=ratio.mean().item(),
        ratio_max=ratio.max().item(),
        clip_fraction=outside.double().mean().item(),
        first_mismatch=first[0] if first else None,
        positions=positions,
        likely_cause=OTHER_SAMPLING if _looks_like_sampling(d, rollout) else None,
    )


def _looks_like_sampling(d: Tensor, rollout: Tensor) -> bool:
    """Whether differences d [N], 0 where tokens match, are those of other sampling parameters.

    Most tokens then differ, by far more than rounding. Truncation moves all logprobs to one
    side, a temperature moves likely tokens against unlikely ones. Rounding and quantization do
    neither.
    """
    known = d.isfinite() & (d != 0)
    moved, at = d[known], rollout[known].double()
    if len(moved) < max(16, len(d) // 2) or float(moved.abs().mean()) < 1e-3:
        return False
    one_sided = float(moved.sum() / moved.abs().sum())
    follows = float(torch.corrcoef(torch.stack([moved, at]))[0, 1])
    return abs(one_sided) >= 0.9 or abs(follows) >= max(0.4, 3 / math.sqrt(len(moved)))


def ordered_integers(values: Tensor) -> Tensor:
    """fp32 -> int64, one step per representable number: +0 is 0, and -0 is -1. The ULP distance of
    two values is the difference of their integers."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -1 - (bits & 0x7FFFFFFF))


def _tensors(values: Any, dtype: torch.dtype | None = None) -> LogProbs:
    """Lists of numbers as tensors; tensors, and what is neither, as they are."""

    def numbers(found: Any) -> bool:
        return isinstance(found, list | tuple) and all(isinstance(x, int | float) for x in found)

    if isinstance(values, list | tuple) and values:
        if numbers(values):
            return torch.tensor(values, dtype=dtype)
        empty = dtype or torch.bool
        made = (torch.tensor(p, dtype=dtype if p else empty) if numbers(p) else p for p in values)
        return list(made)
    return values


def _parts(values: LogProbs) -> list[Tensor]:
    parts = [values] if isinstance(values, Tensor) else list(values)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(
                f"a {type(part).__name__} stands among what is compared; give a tensor, or one for "
                "each sequence"
            )
    return parts


def _joined(values: LogProbs) -> Tensor:
    parts = _parts(values)
    return torch.cat([part.detach().reshape(-1) for part in parts]) if parts else torch.empty(0)


def _sides(rollout: LogProbs, training: LogProbs) -> tuple[Tensor, Tensor]:
    """Both sides, flat, on the device of the first."""
    theirs = _like(rollout, training, "training")
    for side, values in (("rollout", rollout), ("training", training)):
        for part in _parts(values):
            if part.dtype != torch.float32:
                raise TypeError(
                    f"{side} logprobs must be torch.float32, got {part.dtype}; compare them uncast"
                )
    return _joined(rollout), theirs


def _like(rollout: LogProbs, other: LogProbs, name: str) -> Tensor:
    """The other values, flat, on the rollout's device; ValueError for another shape than its."""
    sides = _parts(rollout), _parts(other)
    found: list[str] = []
    if isinstance(rollout, Tensor) != isinstance(other, Tensor):
        # One side flat, one per sequence: only the totals can be compared.
        found = [f"{sum(part.numel() for part in side)} tokens" for side in sides]
    elif len(sides[0]) != len(sides[1]):
        found = [f"{len(side)} sequences" for side in sides]
    else:
        for i, pair in enumerate(zip(*sides, strict=True)):
            if pair[0].shape != pair[1].shape:
                where = "" if isinstance(rollout, Tensor) else f" in sequence {i}"
                found = [f"shape {list(part.shape)}{where}" for part in pair]
                break
    if len({*found}) > 1:
        raise ValueError(
            f"rollout has {found[0]} but {name} has {found[1]}; both sides must hold the same "
            "tokens in the same order"
        )
    return _joined(other).to(sides[0][0].device if sides[0] else "cpu")


def total_of(reports: Iterable[DriftReport | None]) -> DriftReport | None:
    """The report of all these, in their order; None if there is none."""
    known = [report for report in reports if report is not None]
    return reduce(DriftReport.merge, known) if known else None
