"""Hooks that transformers leaves on modules for good, and that change no value."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import output_capturing

_ENABLE = PreTrainedModel.enable_input_require_grads
_INSTALL = output_capturing.install_output_capuring_hook


def asks_for_gradients(hook: Any) -> bool:
    """Whether a hook is transformers' own that calls `requires_grad_`.

    Gradient checkpointing puts it on the embedding, another one each time it is enabled, and leaves
    it there when it is disabled. TRL does both in every step.
    """
    return _is_made_by(hook, _ENABLE, "make_inputs_require_grads")


def captures_outputs(hook: Any) -> bool:
    """Whether a hook is transformers' own that collects hidden states, attentions or router logits.

    The first stock forward that is asked for one of these puts it on the modules. It collects
    nothing in other forwards.
    """
    return _is_made_by(hook, _INSTALL, "output_capturing_hook")


def is_of(function: Any, module: str) -> bool:
    """Whether it is a function of this module, and nothing that wraps one."""
    return type(function) is FunctionType and function.__globals__.get("__name__") == module


def _is_made_by(hook: Any, maker: Any, name: str) -> bool:
    """Whether it is the function of this name that `maker` defines inside."""
    inside = f"{maker.__qualname__}.<locals>.{name}"
    return is_of(hook, maker.__module__) and hook.__code__.co_qualname == inside
