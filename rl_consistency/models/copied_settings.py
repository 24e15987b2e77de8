"""What canonical modules take from the config when their model is patched.

A forward pass reads these, and not the config. So a config that was changed since is a fault.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rl_consistency.models import families
from rl_consistency.models.modules import (
    CanonicalAttention,
    CanonicalMLP,
    CanonicalRotaryEmbedding,
)
from rl_consistency.models.moe.modules import CanonicalExperts, CanonicalRouter
from rl_consistency.models.moe.settings import normalizes


def copied_settings(config: Any, module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that hold what the config says."""
    if isinstance(module, CanonicalMLP | CanonicalExperts):
        return {"activation": families.ACTIVATIONS[config.hidden_act]}
    if isinstance(module, CanonicalRouter):
        return {"normalizes": normalizes(config)}
    if isinstance(module, CanonicalAttention):
        return {"window": families.window_of(config, module)}
    if isinstance(module, CanonicalRotaryEmbedding):
        return {"rope_settings": repr(config.rope_parameters)}
    return {}
