"""Gradient checkpointing of layers, by torch and transformers: what it leaves behind, and what of
it is covered."""

from __future__ import annotations

from functools import partial
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
    name = f"{_ENABLE.__qualname__}.<locals>.make_inputs_require_grads"
    return _is_of_transformers(hook) and hook.__code__.co_qualname == name


def is_checkpointed_otherwise(module: nn.Module) -> bool:
    """Whether a module is checkpointed by another function than torch's, or than transformers'
    around that one. What it does beside, also without gradients, cannot be known."""
    own = vars(module)
    if not own.get("gradient_checkpointing") or not module.training:
        return False
    run = own.get("_gradient_checkpointing_func")
    if type(run) is partial:
        run = run.func
    return run is not checkpoint and not _is_of_transformers(run)


def _is_of_transformers(function: Any) -> bool:
    """Whether it is a function of the module of `PreTrainedModel`, and nothing that wraps one."""
    if type(function) is not FunctionType:
        return False
    return function.__globals__.get("__name__") == PreTrainedModel.__module__


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
