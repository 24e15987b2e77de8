"""bf16 mixed precision of a trainer, as bfloat16 weights under fp32 masters.

Autocast rounds fp32 weights to bfloat16 at each product. Here they are rounded once a step; the
optimizer updates the fp32 masters that they are rounded from, so no small update is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.models.sharding import unwrapped
from rl_consistency.numerics.masters import follow_weights
from rl_consistency.numerics.patched import replaced

_log = logging.getLogger(__name__)


def is_bf16(trainer: Any) -> bool:
    """Whether the trainer would run under bf16 autocast."""
    return bool(trainer.args.bf16) or trainer.accelerator.mixed_precision == "bf16"


@contextmanager
def bf16_weights(
    trainer: Any, *, unless: Callable[[], bool] = lambda: False
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Round the fp32 weights of a trainer's models to bfloat16, and leave autocast out.

    Gives the fp32 values of the policy's trained weights, for an optimizer to update; the weights
    get these values back when the block ends, unless `unless` says True. Buffers stay as they are.
    """
    policy, reference = trainer.model, getattr(trainer, "ref_model", None)
    masters: dict[nn.Parameter, Tensor] = {}
    count = sum(p.numel() for p in policy.parameters() if p.dtype == torch.float32)
    with ExitStack() as stack:
        stack.enter_context(replaced(trainer.accelerator, "native_amp", False))
        for model in (policy, *([] if reference is None else [unwrapped(reference)])):
            for weight in model.parameters():
                if weight.dtype != torch.float32:
                    continue
                if model is policy and weight.requires_grad:
                    masters[weight] = weight.data
                _recast(weight, weight.data.bfloat16())
                stack.callback(_widen, weight, masters, unless)
        if count and trainer.is_world_process_zero():
            _log.warning(
                "rl_consistency.attach: bf16=True: the model's %s fp32 weights are computed with "
                "in bfloat16, without autocast, and AdamW updates fp32 masters of them",
                f"{count:,}",
            )
        yield masters


def _widen(
    weight: nn.Parameter, masters: dict[nn.Parameter, Tensor], unless: Callable[[], bool]
) -> None:
    if unless():
        return
    if weight in masters:  # the best checkpoint, loaded into the weights, is to stay
        follow_weights([weight], [masters[weight]])
    _recast(weight, masters[weight] if weight in masters else weight.data.float())


def _recast(weight: nn.Parameter, values: Tensor) -> None:
    """Give a parameter values of another dtype in place, its gradient too."""
    gradient, weight.grad = weight.grad, None
    weight.data = values
    weight.grad_dtype = values.dtype  # pyright: ignore[reportAttributeAccessIssue]
    weight.grad = None if gradient is None else gradient.to(values.dtype)
