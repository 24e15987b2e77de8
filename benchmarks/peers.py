"""Liger, which is measured beside ours where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def installed() -> dict[str, str]:
    """The version of Liger, where it is here."""
    return {"liger_kernel": version("liger_kernel")} if find_spec("liger_kernel") else {}


def peer(name: str) -> ModuleType | None:
    """A module of a peer, or None where the peer is not installed."""
    return import_module(name) if find_spec(name.split(".")[0]) else None


def liger(name: str) -> Callable[..., Any] | None:
    """The `apply` of one of Liger's autograd functions, such as `LigerRMSNormFunction`."""
    module = peer("liger_kernel.ops")
    return module and getattr(module, name).apply


def patch_by_liger(model: Any) -> Callable[[], AbstractContextManager[None]] | None:
    """Patch a causal LM of Hugging Face; returns a context to run it in, or None without Liger, or
    where it has no such family. Raises what Liger raises where it does not know this model's parts.

    Liger also replaces functions of the modelling file, for every model of the process. They are
    put back at once; the context brings them in again.
    """
    module, causal_lm = peer("liger_kernel.transformers"), type(model)
    apply = getattr(module, f"apply_liger_kernel_to_{model.config.model_type}", None)
    if apply is None:
        return None
    modeling = import_module(causal_lm.__module__)
    before, forward = dict(vars(modeling)), causal_lm.forward
    try:
        apply(model=model)
    finally:
        changed = {k: value for k, value in vars(modeling).items() if before.get(k) is not value}
        vars(modeling).update(before)
        causal_lm.forward = forward

    @contextmanager
    def brought_in() -> Iterator[None]:
        vars(modeling).update(changed)
        try:
            yield
        finally:
            vars(modeling).update(before)

    return brought_in
