"""AdamW over fp32 masters, in the place of the optimizer that a trainer would make."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
"""Names of `args.optim` that are torch's AdamW."""


class MasterAdamW(torch.optim.AdamW):
    """torch's AdamW on fp32 copies of 16-bit weights, which are rounded into them after each step.

    An update smaller than half a unit in the weight's last place is kept in its master. A weight
    that others write between two steps, as a checkpoint's loader does, becomes its own master.

    Args:
        groups: parameter groups of an AdamW over the weights; all their options are kept.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._weights: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        masters = [
            {**group, "params": [nn.Parameter(p.detach().float()) for p in group["params"]]}
            for group in groups
        ]
        super().__init__(masters)
        self._masters: list[nn.Parameter] = [p for g in self.param_groups for p in g["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the weights; `set_to_none=False` writes zeros."""
        for weight in self._weights:
            if set_to_none or weight.grad is None:
                weight.grad = None
            else:
                weight.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the masters by the gradients of the weights, then round them into the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_writes()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None
            weight.copy_(master)
        return loss

    @torch.no_grad()
    def _follow_writes(self) -> None:
        # Versions of tensors do not tell: what writes through `.data` leaves them as they are.
        for weight, master in zip(self._weights, self._masters, strict=True):
            kept = master.to(weight.dtype) == weight
            if not kept.all():  # copies in fp32 are large
                master.copy_(torch.where(kept, master, weight.float()))

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the masters."""
        return {**super().state_dict(), "masters": [m.detach() for m in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, or that of an AdamW over the weights themselves:
        their masters are then the weights."""
        state_dict = dict(state_dict)
        masters = state_dict.pop("masters", self._weights)
        for master, saved in zip(self._masters, masters, strict=True):
            master.copy_(saved)
        super().load_state_dict(state_dict)


def with_masters(trainer: Any) -> MasterAdamW:
    """The optimizer that the trainer's arguments ask for, over fp32 masters.

    ValueError if they, or the trainer's class, ask for another than AdamW.
    """
    if trainer.args.optim not in OPTIMIZERS:
        raise ValueError(
            f"attach() got optim={trainer.args.optim.value!r} for a model in "
            f"{next(trainer.model.parameters()).dtype}; with fp32 masters there is "
            f"{' and '.join(OPTIMIZERS)}. Set one, give the trainer an optimizer, or load the "
            "model in float32."
        )
    stock = trainer.create_optimizer()
    trainer.optimizer = None
    if type(stock) is not torch.optim.AdamW:
        raise ValueError(
            f"attach() would put AdamW with fp32 masters in the place of the trainer's "
            f"{type(stock).__name__}. Give the trainer this optimizer (optimizers=), or load the "
            "model in float32."
        )
    return MasterAdamW(stock.param_groups)
