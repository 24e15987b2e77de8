"""AdamW over fp32 weights, whatever the policy's dtype, with clipping in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import get_scheduler

from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.trainers.config.learning_sections import OptimizerSection


class PolicyOptimizer:
    """torch's AdamW and a transformers schedule, prepared by accelerate.

    A bf16 or fp16 policy is updated through fp32 master weights, which are rounded into the policy
    in place after every step; an fp32 policy is its own master. Gradients are read from
    `parameter.grad`, which the canonical backward leaves in fp32 (the stock one in the policy's
    dtype, widened here).

    On a GPU the update is torch's fused one, elsewhere the plain loop. Either is one formula
    applied element by element, so that an element's update does not depend on the tensor it is in;
    the two round differently. Foreach is not used: its choice of path, hence its rounding, depends
    on the other tensors of the list.
    """

    def __init__(
        self,
        model: nn.Module,
        section: OptimizerSection,
        accelerator: Accelerator,
        *,
        total_steps: int,
    ):
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        self._max_norm = section.max_grad_norm
        adamw = torch.optim.AdamW(
            self._masters,
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.eps,
            weight_decay=section.weight_decay,
            **_variant(self._masters),
        )
        schedule = get_scheduler(
            "constant_with_warmup" if section.schedule == "constant" else section.schedule,
            optimizer=adamw,
            num_warmup_steps=section.warmup_steps,
            num_training_steps=total_steps,
        )
        self._optimizer: Any
        self._schedule: Any
        self._optimizer, self._schedule = accelerator.prepare(adamw, schedule)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._schedule.get_last_lr()[0])

    def step(self, norm: float | None = None) -> float:
        """Clip and drop the gradients, update the weights; returns the norm before clipping.

        `norm` is that of the gradients, where their leaves were summed; None computes it.
        ValueError, and nothing updated, when a gradient is missing or not finite.
        """
        gradients = [self._gradient(i) for i in range(len(self._parameters))]
        if norm is None:
            norm = float(gradient_norm(gradients))
        if not norm < float("inf"):
            raise ValueError(
                f"the gradient norm is {norm}; no weight was changed. Lower the learning rate, "
                "look for extreme rewards, or resume from the last checkpoint."
            )
        if self._max_norm is not None and norm > self._max_norm:
            for gradient in gradients:
                gradient.mul_(self._max_norm / norm)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        self._optimizer.step()
        self._schedule.step()
        self._publish()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Drop all gradients: the next backward pass starts from zero."""
        for parameter in (*self._parameters, *self._masters):
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters of a low-precision policy, by parameter name; for a checkpoint."""
        state, found = self._optimizer.state_dict()["state"], {}
        for i, name in enumerate(self._names):
            found |= {f"{name}.{key}": value for key, value in state.get(i, {}).items()}
            if self._masters[i] is not self._parameters[i]:
                found[f"{name}.master"] = self._masters[i].detach()
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def schedule_state(self) -> dict[str, Any]:
        """The schedule's state as plain numbers; for a checkpoint."""
        state = self._schedule.state_dict()
        return {k: v for k, v in state.items() if isinstance(v, int | float | list | bool)}

    def load(self, tensors: dict[str, Tensor], schedule: dict[str, Any]) -> None:
        """Continue from what `tensors` and `schedule_state` gave."""
        state: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for key, value in tensors.items():
                name, _, part = key.rpartition(".")
                i = self._names.index(name)
                if part == "master":
                    self._masters[i].copy_(value)
                else:
                    state.setdefault(i, {})[part] = value.clone()
        self._optimizer.load_state_dict(
            {"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]}
        )
        self._schedule.load_state_dict({**self._schedule.state_dict(), **schedule})
        (group,), (rate,) = self._optimizer.param_groups, self._schedule.get_last_lr()
        group["lr"] = rate

    def _gradient(self, i: int) -> Tensor:
        gradient = self._parameters[i].grad
        if gradient is None:
            raise ValueError(
                f"parameter {self._names[i]} has no gradient: it must take part in the loss."
            )
        return gradient.float()

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)


def _variant(masters: list[nn.Parameter]) -> dict[str, bool]:
    """Which of torch's AdamW loops runs."""
    return {"foreach": False, "fused": all(master.is_cuda for master in masters)}
