"""Gradient checkpointing of layers, by torch and transformers: what of it is covered."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rl_consistency.models.known_hooks import is_of


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
