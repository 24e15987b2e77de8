"""Gradient checks: the same step cut another way must give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.models.packing import Layout, lay_out
from rl_consistency.models.scoring.token_logprobs import TokenLogprobs, token_logprobs
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.bytes import bits

LossFunction = Callable[[TokenLogprobs, Sequence[int]], Tensor]
"""(logprobs of some sequences, their indices) -> their share of the loss, a scalar.

The shares must add up to the whole batch's loss: weights come from global counts.
"""


@dataclass(frozen=True)
class Regrouping:
    """One way to cut a batch into backward passes."""

    name: str
    sizes: tuple[int, ...]
    """Sequences of successive micro-batches; repeated until the batch is used up."""
    layout: Layout = "packed"

    def groups(self, count: int) -> Iterator[list[int]]:
        """Indices of each micro-batch, in logical order."""
        left = iter(range(count))
        for size in cycle(self.sizes):
            if not (group := list(islice(left, size))):
                return
            yield group


WHOLE = Regrouping("all at once", (1 << 30,))

REGROUPINGS = (
    Regrouping("micro-batch 1", (1,)),
    Regrouping("uneven", (1, 3, 2)),
    Regrouping("left-padded by 2", (2,), "left_padded"),
    Regrouping("right-padded", (1 << 30,), "right_padded"),
    Regrouping("packed with gaps", (3,), "packed_with_gaps"),
)
"""Compared with the whole packed batch when nothing else is asked for."""


@dataclass(frozen=True, repr=False)
class RegroupingResult:
    """One regrouping against the whole batch."""

    name: str
    differing: Mapping[str, int]
    """Gradient elements whose fp32 bytes differ, of each parameter in model order."""

    @property
    def mismatched_elements(self) -> int:
        return sum(self.differing.values())

    @property
    def first_parameter(self) -> str | None:
        return next((name for name, count in self.differing.items() if count), None)

    def __repr__(self) -> str:
        found = {name: count for name, count in self.differing.items() if count}
        told = f"differing={found}" if found else f"0 elements of {len(self.differing)} parameters"
        return f"RegroupingResult({self.name!r}, {told})"


@dataclass(frozen=True)
class GradientReport:
    """What a gradient check found."""

    results: tuple[RegroupingResult, ...]
    elements: int
    """Gradient elements compared per regrouping."""
    nonzero: int
    """Of these, the ones that are not zero. Where there is none, nothing is checked."""
    non_finite: int = 0
    """Gradient elements that are NaN or infinite, whose equal bytes prove nothing."""

    @property
    def passed(self) -> bool:
        return self.failure() is None

    @property
    def without_gradient(self) -> bool:
        """Whether all elements are zero under every grouping, which neither passed nor failed."""
        return self.elements > 0 and not self.nonzero and not self.mismatched_elements

    @property
    def mismatched_elements(self) -> int:
        return sum(result.mismatched_elements for result in self.results)

    @property
    def first_parameter(self) -> str | None:
        return next((r.first_parameter for r in self.results if r.first_parameter), None)

    def failure(self) -> str | None:
        """The first regrouping and parameter that differ, or what proves nothing; None: passed."""
        if not self.elements:
            return "no gradient was compared: no parameter takes part in the loss"
        if self.non_finite:
            return f"{self.non_finite} of {self.elements} gradient elements are NaN or infinite"
        for result in self.results:
            if result.mismatched_elements:
                return (
                    f"gradients depend on how the batch was cut: {result.name!r} differs from one "
                    f"whole packed batch in {result.mismatched_elements} of {self.elements} "
                    f"elements, first in {result.first_parameter}"
                )
        if self.without_gradient:
            return f"no gradient, nothing checked: all {self.elements} elements are zero"
        return None

    def require_passed(self) -> None:
        """Raise a `ConsistencyError` with the `failure`, if there is one, or nothing checked."""
        if found := self.failure():
            raise ConsistencyError(
                f"{found}. Run `rl-consistency verify`, and check that the loss is finite and its "
                "weights come from global counts."
            )


def check_gradients(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    *,
    prompt_lengths: Sequence[int] | None = None,
    loss_mask: Sequence[Sequence[bool]] | None = None,
    loss: LossFunction,
    sampling: Any = None,
    regroupings: Iterable[Regrouping] = REGROUPINGS,
    compare_present: bool = False,
    balance: bool = False,
) -> GradientReport:
    """Recompute one step's gradients under other regroupings and compare bytes.

    Gradients present before the call are put back after it; weights are not touched. Each rank
    computes the gradients of its own sequences, and nothing is sent but the weights that are
    gathered where ranks keep shards: all ranks call it then.

    Args:
        model: patched causal LM, or a wrapper around it.
        sequences: token ids, in logical order.
        prompt_lengths: tokens at the start of each sequence that are not scored.
        loss_mask: instead of prompt_lengths, True at the tokens of each sequence to score.
        loss: share of the loss of some sequences, see `LossFunction`.
        sampling: as in `token_logprobs`.
        regroupings: what to compare with the whole packed batch.
        compare_present: also compare the gradients the parameters hold now, "as trained".
        balance: as in `token_logprobs`.

    ValueError where no token is scored, or with `balance` none of some sequence.
    """

    def scores(i: int) -> bool:
        if isinstance(loss_mask, Sequence):
            return any(loss_mask[i])
        return not isinstance(prompt_lengths, Sequence) or prompt_lengths[i] < len(sequences[i])

    if balance and (unscored := [i for i in range(len(sequences)) if not scores(i)]):
        raise ValueError(
            f"sequences {unscored} have no scored token, so they cannot be cut from the others "
            "with the balance loss; leave them out of the check."
        )
    with whole_weights(model) as policy:

        def gradients(regrouping: Regrouping) -> dict[str, Tensor]:
            policy.zero_grad(set_to_none=True)
            for group in regrouping.groups(len(sequences)):
                if regrouping is not WHOLE and not any(map(scores, group)):
                    continue  # it has no loss, and so no gradient
                device = next(policy.parameters()).device
                inputs, mask = lay_out(_of(group, sequences), regrouping.layout, device)
                scored = token_logprobs(
                    policy,
                    inputs,
                    attention_mask=mask,
                    prompt_lengths=_of(group, prompt_lengths),
                    loss_mask=_of(group, loss_mask),
                    sampling=_of(group, sampling),
                    balance=balance,
                    check_support=False,  # the weights may have been updated since the rollout
                )
                loss(scored, group).backward()
            return _present(policy)

        present = _present(policy)
        with gradients_kept(policy):
            whole = gradients(WHOLE)
            results = [_compare(r.name, whole, gradients(r)) for r in regroupings]
    if compare_present:
        results.insert(0, _compare("as trained", whole, present))
    non_finite = sum(int((~gradient.isfinite()).sum()) for gradient in whole.values())
    nonzero = sum(int((gradient != 0).sum()) for gradient in whole.values())
    elements = sum(gradient.numel() for gradient in whole.values())
    return GradientReport(tuple(results), elements, nonzero, non_finite)


def _present(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.grad.detach() for name, p in named if p.grad is not None}


def _of(group: list[int], each: Any) -> Any:
    """What belongs to some sequences; a value for all of them as it is."""
    return [each[i] for i in group] if isinstance(each, Sequence) else each


def _compare(name: str, expected: dict[str, Tensor], actual: dict[str, Tensor]) -> RegroupingResult:
    differing: dict[str, int] = {}
    for parameter, present in (actual | expected).items():
        pair = [bits(side[parameter].float()) for side in (expected, actual) if parameter in side]
        differing[parameter] = int(torch.ne(*pair).sum()) if len(pair) == 2 else present.numel()
    return RegroupingResult(name, differing)


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Put the gradients found at the start of the block back at its end."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
