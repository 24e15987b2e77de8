"""fp32 masters: what an optimizer updates where weights have fewer bits.

An update smaller than half a unit in a weight's last place is kept in its master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def rounded(masters: dict[str, nn.Parameter], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """The masters themselves, with values that `dtype` has: what forward passes compute with."""
    for master in masters.values():
        master.copy_(master.to(dtype))
    return masters


def step_masters(
    step: Callable[[], Any], masters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None]
) -> None:
    """Call an optimizer's `step` with these gradients, which the masters do not keep."""
    masters = list(masters)
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    step()
    for master in masters:
        master.grad = None


@torch.no_grad()
def round_into(weights: Iterable[nn.Parameter], masters: Iterable[nn.Parameter]) -> None:
    """Round masters into their weights."""
    for weight, master in zip(weights, masters, strict=True):
        if weight is not master:
            weight.copy_(master)


@torch.no_grad()
def follow_weights(weights: Iterable[Tensor], masters: Iterable[Tensor]) -> None:
    """Take values that others wrote into weights over into their masters."""
    # Versions of tensors do not tell: what writes through `.data` leaves them as they are.
    for weight, master in zip(weights, masters, strict=True):
        kept = master.to(weight.dtype) == weight
        if not kept.all():  # copies in fp32 are large
            master.copy_(torch.where(kept, master, weight.float()))


class MasterAdamW(torch.optim.AdamW):
    """torch's AdamW on fp32 copies of 16-bit weights, which are rounded into them after each step.

    A weight that others write between two steps, as a checkpoint's loader does, becomes its own
    master.

    Args:
        groups: parameter groups of an AdamW over the weights; all their options are kept.
        values: fp32 values that weights were rounded from; their masters are these tensors.
    """

    def __init__(
        self, groups: list[dict[str, Any]], values: Mapping[nn.Parameter, Tensor] | None = None
    ) -> None:
        self._weights: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        wide = [(values or {}).get(weight, weight.detach()).float() for weight in self._weights]
        self._masters = list(map(nn.Parameter, wide))
        masters = iter(self._masters)
        super().__init__([{**g, "params": list(islice(masters, len(g["params"])))} for g in groups])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the weights; `set_to_none=False` writes zeros."""
        for weight in self._weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the masters by the gradients of the weights, then round them into the weights."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        follow_weights(self._weights, self._masters)
        gradients = [None if w.grad is None else w.grad.float() for w in self._weights]
        step_masters(super().step, self._masters, gradients)
        round_into(self._weights, self._masters)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the masters."""
        return {**super().state_dict(), "masters": [m.detach() for m in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, or that of an AdamW over the weights themselves:
        their masters are then the weights."""
        saved = dict(state_dict)
        for master, value in zip(self._masters, saved.pop("masters", self._weights), strict=True):
            master.copy_(value)
        super().load_state_dict(saved)
