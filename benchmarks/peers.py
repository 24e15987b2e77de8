"""Public projects that are measured beside ours where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
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
    return find_spec(module) is not None


def batch_invariant_ops() -> ModuleType | None:
    """batch_invariant_ops, of which the persistent matmul and the whole mode are measured."""
    return import_module("batch_invariant_ops") if _present("batch_invariant_ops") else None


@contextmanager
def batch_invariant_mode() -> Iterator[None]:
    """Its matmul, log_softmax and mean in place of those of torch."""
    module = import_module("batch_invariant_ops")
    module.enable_batch_invariant_mode()
    try:
        yield
    finally:
        module.disable_batch_invariant_mode()


def liger(name: str) -> Callable[..., Any] | None:
    """The `apply` of one of Liger's autograd functions, such as `LigerRMSNormFunction`."""
    if not _present("liger_kernel"):
        return None
    return getattr(import_module("liger_kernel.ops"), name).apply


def liger_cross_entropy(accumulator: torch.dtype | None) -> Callable[..., Tensor] | None:
    """(weight, hidden, targets) -> mean loss, linear and cross-entropy fused."""
    if not _present("liger_kernel"):
        return None
    module = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)


@contextmanager
def _replaced(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
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
    if not _present("liger_kernel"):
        return None
    modeling = import_module("transformers.models.qwen3.modeling_qwen3")
    before, forward = dict(vars(modeling)), modeling.Qwen3ForCausalLM.forward
    import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen3(model=model)
    changed = {k: value for k, value in vars(modeling).items() if before.get(k) is not value}
    vars(modeling).update({name: before[name] for name in changed})
    modeling.Qwen3ForCausalLM.forward = forward
    return lambda: _replaced(modeling, changed)
