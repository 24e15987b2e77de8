"""Which gradient buffer belongs to which use of a model's parameters."""

from __future__ import annotations

from torch import nn

from rl_consistency.kernels.gradient_fold.backward_passes import BackwardPasses
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer


def gradient_buffers(model: nn.Module, passes: BackwardPasses) -> dict[str, GradientBuffer]:
    """One buffer per use of each parameter, by qualified name; a tied parameter has several."""
    uses: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            uses.setdefault(parameter, []).append(own)
    return {
        name: buffer
        for parameter, names in uses.items()
        for name, buffer in zip(
            names, GradientBuffer.for_uses(parameter, len(names), passes), strict=True
        )
    }


def own_buffers(
    buffers: dict[str, GradientBuffer], name: str, module: nn.Module
) -> dict[str, GradientBuffer]:
    """The buffers of a module's own parameters, by their names in it."""
    own = dict(module.named_parameters(recurse=False))
    return {key: buffers[f"{name}.{key}".lstrip(".")] for key in own}


def restore_gradient_dtype(parameter: nn.Parameter) -> None:
    """Let the gradient have the parameter's dtype, with a present one rounded to it."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = parameter.dtype  # pyright: ignore[reportAttributeAccessIssue]
    parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
