"""What transformers puts on modules: hooks that change no value, and gradient checkpointing."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import output_capturing

_ENABLE = PreTrainedModel.enable_input_require_grads
_INSTALL = output_capturing.install_output_capuring_hook


def asks_for_gradients(hook: Any) -> bool:
    """Whether a hook is transformers' own that calls `requires_grad_`: gradient checkpointing puts
    one on the embedding each time it is enabled, and leaves it there."""
    return _is_made_by(hook, _ENABLE, "make_inputs_require_grads")


def captures_outputs(hook: Any) -> bool:
    """Whether a hook is transformers' own that collects hidden states, attentions or router logits:
    in the stock forwards that are asked for them, and in no other."""
    return _is_made_by(hook, _INSTALL, "output_capturing_hook")


def is_of(function: Any, module: str) -> bool:
    """Whether it is a function of this module, and nothing that wraps one."""
    return type(function) is FunctionType and function.__globals__.get("__name__") == module


def _is_made_by(hook: Any, maker: Any, name: str) -> bool:
    """Whether it is the function of this name that `maker` defines inside."""
    inside = f"{maker.__qualname__}.<locals>.{name}"
    return is_of(hook, maker.__module__) and hook.__code__.co_qualname == inside


def is_checkpointed_otherwise(module: nn.Module) -> bool:
    """Whether a module is checkpointed by another function than torch's, or than transformers'
    around that one. What it does beside, also without gradients, cannot be known."""
    own = vars(module)
    if not own.get("gradient_checkpointing") or not module.training:
        return False
    run = own.get("_gradient_checkpointing_func")
    if type(run) is partial:
        run = run.func
    return run is not checkpoint and not is_of(run, PreTrainedModel.__module__)


def refuse_selective_checkpointing() -> None:
    """ValueError where checkpointing keeps the results of some ops (`context_fn`)."""
    # What is computed again takes them by their number. But the first pass also computes what later
    # ones find, layouts and comparisons with libraries; so it would take others, unseen.
    modes = _get_current_dispatch_mode_stack()
    if any(type(mode).__module__ == checkpoint.__module__ for mode in modes):
        raise ValueError(
            "selective checkpointing (a context_fn that keeps the results of some ops) would give "
            "wrong gradients here. Leave context_fn out: checkpointing of whole layers is covered."
        )
