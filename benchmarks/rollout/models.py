"""The models that the rollout benches generate with: one at a time, random or from disk."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset, known_presets

DTYPE = torch.bfloat16


class ModelShelf:
    """Holds the model that was asked for last, because consecutive cases often share one."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._model: Any = None

    def model(self, name: str, device: torch.device) -> Any:
        """The stock model in bf16: a preset with random weights, or a model directory.

        Frees the caches and graphs of the case before, and first the model held before.
        """
        release_memory(device)
        if name != self._name:
            self.clear(device)
            self._model, self._name = _built(name, device), name
        return self._model

    @contextmanager
    def patched(self, name: str, device: torch.device) -> Iterator[Any]:
        """The model under a patch; a model that a failure left behind is not kept."""
        model = self.model(name, device)
        try:
            with patch(model):
                yield model
        except BaseException:
            del model
            self.clear(device)
            raise

    def clear(self, device: torch.device) -> None:
        """Free the model held."""
        self._name = self._model = None
        release_memory(device)


def _built(name: str, device: torch.device) -> Any:
    if name in known_presets():
        return build_preset(name, DTYPE, device=device)
    model: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=DTYPE, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return model.to(device).eval()


def release_memory(device: torch.device) -> None:
    """Give back what dropped models, caches and graphs held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
