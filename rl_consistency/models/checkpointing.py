"""Gradient checkpointing of layers, by torch and transformers: what it leaves behind, and what of
it is covered."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

_ENABLE = PreTrainedModel.enable_input_require_grads


def asks_for_gradients(hook: Any) -> bool:
    """Whether a hook is transformers' own that calls `requires_grad_` and changes no value.

    Gradient checkpointing puts it on the embedding, another one each time it is enabled, and leaves
    it there when it is disabled. TRL does both in every step.
    """
    if type(hook) is not FunctionType:  # what wraps it may do more
        return False
    name = f"{_ENABLE.__qualname__}.<locals>.make_inputs_require_grads"
    return hook.__module__ == _ENABLE.__module__ and hook.__code__.co_qualname == name


def is_checkpointed_otherwise(module: nn.Module) -> bool:
    """Whether a module is checkpointed by another function than torch's, or than transformers'
    around that one. What it does beside, also without gradients, cannot be known."""
    own = vars(module)
    if not own.get("gradient_checkpointing") or not module.training:
        return False
    run: Any = own.get("_gradient_checkpointing_func")
    run = getattr(run, "func", run)
    return run is not checkpoint and getattr(run, "__module__", "") != PreTrainedModel.__module__


def refuse_selective_checkpointing() -> None:
    """ValueError where checkpointing keeps the results of some ops (`context_fn`).

    What is computed again then takes them by their number. But the first pass also computes what
    later ones find: layouts, comparisons with libraries. So it would take others, unseen.
    """
    modes = _get_current_dispatch_mode_stack()
    if any(type(mode).__module__ == checkpoint.__module__ for mode in modes):
        raise ValueError(
            "selective checkpointing (a context_fn that keeps the results of some ops) would give "
            "wrong gradients here. Leave context_fn out: checkpointing of whole layers is covered."
        )
