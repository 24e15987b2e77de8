"""Sharded weights gathered for a rollout, a digest or a check."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rl_consistency.models.sharding import (
    WHOLE,
    has_shards,
    has_zero3,
    is_fsdp,
    modules_of,
    of_a_library,
    parameters_of,
    unwrapped,
)

_ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Policies that FSDP2 knows to be roots."""


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, every parameter of the policy, which it yields, is whole and plain, and
    neither forward nor backward passes speak with other ranks: for rollouts, digests and checks.

    Every rank enters it. What is written to parameters inside is lost. It may be nested, and does
    nothing to a policy that is not sharded.
    """
    policy = unwrapped(model)
    if policy in WHOLE:
        yield policy
        return
    with ExitStack() as stack:
        if has_shards(policy):
            gathered = _gathered_by_zero3 if has_zero3(policy) else _unsharded
            stack.enter_context(gathered(policy))
        stack.enter_context(_no_library_hooks(policy))
        WHOLE.add(policy)
        stack.callback(WHOLE.discard, policy)
        yield policy


@contextmanager
def _unsharded(policy: nn.Module) -> Iterator[None]:
    modules: list[Any] = [m for m in policy.modules() if is_fsdp(m)]
    if policy not in _ROOTS:
        with torch.no_grad():  # FSDP2 takes the first module that is called for the root
            policy(run=lambda: ())
        _ROOTS.add(policy)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


@contextmanager
def _gathered_by_zero3(policy: nn.Module) -> Iterator[None]:
    parameters: list[Any] = list(policy.parameters())
    # A backward pass leaves some gathered, which would be freed a second time.
    parameters[0]._z3_optimizer.parameter_offload.partition_all_parameters()
    with sys.modules["deepspeed"].zero.GatheredParameters(parameters):
        yield


@contextmanager
def _no_library_hooks(policy: nn.Module) -> Iterator[None]:
    """Take off the hooks that would gather and free parameters, or reduce gradients."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    of_modules = [vars(module)[kind] for module in modules_of(policy) for kind in kinds]
    of_parameters: list[Any] = [x._post_accumulate_grad_hooks for x in parameters_of(policy)]
    for hooks in filter(None, [*of_modules, *of_parameters]):
        if any(map(of_a_library, hooks.values())):
            taken.append((hooks, dict(hooks)))
            for key in [key for key, hook in hooks.items() if of_a_library(hook)]:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in taken:
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | added)
