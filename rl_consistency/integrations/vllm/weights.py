"""Weights of a checkpoint or a trainer into the patched model that vLLM serves."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader


def load_weights(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy tensors by name into the model's parameters; returns the names of those in vLLM's model.

    vLLM's layerwise reload puts parameters on the meta device and a loader in place; it is asked.
    """
    parameters, loaded = dict(hf.named_parameters()), set[str]()
    with torch.no_grad():
        for name, tensor in weights:
            if name in parameters:  # a tied head is not
                parameter: Any = parameters[name]
                load = getattr(parameter, "weight_loader", default_weight_loader)
                load(parameter, tensor)
                loaded.add("hf." + name)
    return loaded
