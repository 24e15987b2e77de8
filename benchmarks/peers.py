"""Public projects that are measured beside ours where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PEERS = {"liger_kernel": "liger_kernel", "batch_invariant_ops": "batch-invariant-ops"}
"""Module to distribution."""


def installed() -> dict[str, str]:
    """Versions of the peers that are here."""
    return {module: version(name) for module, name in PEERS.items() if _present(module)}


def not_installed(*modules: str) -> dict[str, str]:
    """For `Race.unavailable`: the peers among modules that are not here."""
    return {module: "not installed" for module in modules if not _present(module)}


def _present(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _peer(module: str, submodule: str = "") -> ModuleType | None:
    return import_module(module + submodule) if _present(module) else None


def batch_invariant_matmul() -> Callable[[Tensor, Tensor], Tensor] | None:
    """a [M, K], b [K, N] -> [M, N]: the persistent matmul of batch_invariant_ops."""
    module = _peer("batch_invariant_ops")
    return None if module is None else module.matmul_persistent


def batch_invariant_mode() -> Callable[[], AbstractContextManager[None]] | None:
    """A context with its matmul, log_softmax and mean in place of those of torch."""
    module = _peer("batch_invariant_ops")
    if module is None:
        return None

    @contextmanager
    def mode() -> Iterator[None]:
        module.enable_batch_invariant_mode()
        try:
            yield
        finally:
            module.disable_batch_invariant_mode()

    return mode


def liger(name: str) -> Callable[..., Any] | None:
    """The `apply` of one of Liger's autograd functions, such as `LigerRMSNormFunction`."""
    module = _peer("liger_kernel", ".ops")
    return None if module is None else getattr(module, name).apply


def liger_cross_entropy(accumulator: torch.dtype | None) -> Callable[..., Tensor] | None:
    """(weight, hidden, targets) -> mean loss, linear and cross-entropy fused."""
    module = _peer("liger_kernel", ".transformers.fused_linear_cross_entropy")
    if module is None:
        return None
    return module.LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)


@contextmanager
def _replaced(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def patch_by_liger(model: nn.Module) -> Callable[[], Any] | None:
    """Patch a Qwen3 causal LM; returns a context to run it in, or None without Liger.

    Liger also replaces functions of the modelling file, for every model of the process. They are
    put back at once; the context brings them in again.
    """
    patches = _peer("liger_kernel", ".transformers")
    if patches is None:
        return None
    modeling = import_module("transformers.models.qwen3.modeling_qwen3")
    before = dict(vars(modeling))
    forward = modeling.Qwen3ForCausalLM.forward
    patches.apply_liger_kernel_to_qwen3(model=model)
    changed = {
        name: value for name, value in vars(modeling).items() if before.get(name) is not value
    }
    vars(modeling).update({name: before[name] for name in changed})
    modeling.Qwen3ForCausalLM.forward = forward
    return lambda: _replaced(modeling, changed)
