"""A policy inside what many processes put around it: wrappers, and shards in place of parameters.

A wrapper such as DistributedDataParallel hands calls on to the policy, its `module`. FSDP2
(`fully_shard`) and ZeRO-3 keep a shard of each parameter and gather it for one call of a module.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_consistency.models.installed_code import homes
from rl_consistency.numerics.errors import ConsistencyError


def _class(module: str, name: str) -> tuple[type[Any], ...]:
    """A class of torch for `isinstance`, in a tuple; an empty one if its module is not imported,
    which would cost every process a second or two."""
    found = sys.modules.get(module)
    return () if found is None else (getattr(found, name),)


def is_fsdp(module: object) -> bool:
    """Whether FSDP2 shards the module."""
    return isinstance(module, _class("torch.distributed.fsdp", "FSDPModule"))


WHOLE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Policies whose parameters are whole now, see `whole_weights`."""
_UNWRAPPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Policies that were looked for inside wrappers, and not found."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that wrappers hand calls on to; one without wrappers is its own.

    ValueError for FSDP1, whose flat parameters no order covers, and for a compiled model.
    """
    if isinstance(model, _class("torch._dynamo.eval_frame", "OptimizedModule")):
        raise ValueError(
            "this is torch.compile's wrapper. Whole models are not compiled; give the model itself."
        )
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        if isinstance(model, _class("torch.distributed.fsdp", "FullyShardedDataParallel")):
            raise ValueError(
                "FullyShardedDataParallel flattens parameters, which is not covered; use "
                "torch.distributed.fsdp.fully_shard (FSDP2)."
            )
        model = inner
    return model


def through(
    model: nn.Module, policy: nn.Module, run: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """`run()`, called by the forward pass of the outermost wrapper around the policy.

    The policy has to be that of the wrapper. Without one `run` is called at once: ConsistencyError
    if there is one all the same and gradients are wanted, ValueError for shards without an engine.
    """
    if policy in WHOLE:
        return run()
    if model is not policy or is_fsdp(policy):
        return model(run=run)
    if dist.is_initialized() and has_shards(policy):
        raise ValueError(
            "the policy's parameters are shards: give the DeepSpeed engine, or enter "
            "whole_weights(model) on every rank. Plans of transformers are not covered."
        )
    if torch.is_grad_enabled() and (wrapper := _wrapper_of(policy)) is not None:
        raise ConsistencyError(
            f"this is the inside of a {wrapper}, which would not sum its gradients over the "
            f"ranks. Give the {wrapper} itself."
        )
    return run()


def unsharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` was given for this one; any other is its own."""
    sharded = cls.__bases__[0] in _class("torch.distributed.fsdp", "FSDPModule")
    return cls.__bases__[1] if sharded else cls


def with_base(cls: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """`base`, sharded if `cls` is."""
    if unsharded_class(cls) is cls:
        return base
    own = {"__deepcopy__": vars(cls)["__deepcopy__"]}
    return type(f"FSDP{base.__name__}", (cls.__bases__[0], base), own)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules below it, each once: `model.modules()` in another order, in a tenth
    of its time."""
    found = dict[int, nn.Module]()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left += module._modules.values()
    return [*found.values()]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Parameters of all modules, one at two places twice; see `modules_of`."""
    found = [x for module in modules_of(model) for x in module._parameters.values()]
    return [parameter for parameter in found if parameter is not None]


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are replaced, or emptied, between calls of the modules."""
    return any(map(is_fsdp, modules_of(model))) or has_zero3(model)


def has_shards(model: nn.Module) -> bool:
    """Whether a parameter's values are spread over the ranks now."""
    return any(map(is_shard, parameters_of(model)))


def is_shard(parameter: Tensor) -> bool:
    """Whether the parameter's values are spread over the ranks now."""
    return isinstance(parameter, _class("torch.distributed.tensor", "DTensor")) or (
        hasattr(parameter, "ds_id") and parameter.numel() != parameter.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
    )


def of_a_library(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one by which FSDP2 or DeepSpeed gathers and frees parameters: all of its
    code is in their installed files."""
    found = homes(hook)
    if {home.partition(".")[0] for home in found} <= {"torch", "deepspeed"}:
        return any(home.startswith(_SHARDING) for home in found)
    return False


_SHARDING = ("torch.distributed.fsdp._fully_shard.", "deepspeed.runtime.")


def _wrapper_of(policy: nn.Module) -> str | None:
    """The class of a wrapper around the policy, in a run of several processes; looks once."""
    if policy in _UNWRAPPED or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            # Others' modules may be scripted, or not be initialised yet.
            children = vars(found).get("_modules")
            if isinstance(children, dict) and children.get("module") is policy:
                return type(found).__name__
    _UNWRAPPED.add(policy)
    return None


def has_zero3(model: nn.Module) -> bool:
    """Whether ZeRO-3 keeps shards of the parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in parameters_of(model))
