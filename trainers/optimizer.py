"""An optimizer over fp32 weights, whatever the policy's dtype, with clipping in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.strategies.strategy import Strategy, by_decay
from rl_consistency.trainers.update_rules import build_optimizer, empty_state, put_state, state_of


class GradientNormError(ValueError):
    """Gradients that are not finite; no weight was changed."""


class PolicyOptimizer:
    """An optimizer of `update_rules` and a transformers schedule.

    A bf16 or fp16 policy is updated through fp32 master weights, which are rounded into the policy
    after every step; an fp32 policy is its own master. Where ranks keep shards, a rank updates its
    own. Norms' weights and biases are a group of their own, without decay unless `decay_norms`.
    """

    def __init__(self, ranks: Strategy, section: OptimizerSection, *, total_steps: int):
        self._ranks, self._max_norm = ranks, section.max_grad_norm
        groups = by_decay(ranks.masters(), ranks.decays)
        self._masters = {name: master for group in groups for name, master in group.items()}
        decayed = [bool(section.decay_norms or ranks.decays & group.keys()) for group in groups]
        decays = [section.weight_decay * decay for decay in decayed]
        self._optimizer = build_optimizer(section, list(zip(groups, decays, strict=True)))
        self._schedule: Any = _schedule(self._optimizer, section, total_steps)
        self.begun = 0
        """Updates that were begun by this process."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._schedule.get_last_lr()[0])

    def step(self, norm: float | None = None) -> float:
        """Clip and drop the gradients, update the weights; returns the norm before clipping.

        `norm` is that of the gradients; None computes it. ValueError, and nothing updated, when a
        gradient is missing or not finite; of the latter a GradientNormError.
        """
        gradients = self._ranks.gradients()
        if norm is None:
            norm = self._ranks.norm(gradients)
        if not norm < float("inf"):
            raise GradientNormError(
                f"the gradient norm is {norm}; no weight was changed, and a resumed run would end "
                "here again. Look for extreme rewards, or begin a run at an earlier checkpoint "
                "(policy.path) with a lower learning rate."
            )
        self.begun += 1
        if self._max_norm is not None and norm > self._max_norm:
            for gradient in gradients.values():
                gradient.mul_(self._max_norm / norm)
        self._ranks.update(self._optimizer, self._masters, gradients)
        self._schedule.step()
        self._ranks.drop_gradients()
        return norm

    def skip(self, norm: float) -> float:
        """Drop the gradients, of this norm, and update nothing: moments and schedule stay too."""
        self._ranks.drop_gradients()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters of a low-precision policy, by parameter name; for a checkpoint.

        Every rank calls it. They are whole, and on the CPU where ranks keep shards.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, master in self._masters.items():
            parts = {"master": master} if self._ranks.dtype != torch.float32 else {}
            for key, value in {**state_of(self._optimizer, master), **parts}.items():
                found.setdefault(key, {})[name] = value.detach()
        named = {key: self._ranks.pieces(cut) for key, cut in found.items()}
        return {
            f"{name}.{key}": value.to("cpu", copy=True) if self._ranks.keeps_shards else value
            for key, parts in named.items()
            for name, value in (parts if key == "step" else self._ranks.whole(parts)).items()
        }

    def schedule_state(self) -> dict[str, Any]:
        """The schedule's state as plain numbers; for a checkpoint."""
        state = self._schedule.state_dict()
        return {k: v for k, v in state.items() if isinstance(v, int | float | list | bool)}

    def load(self, tensors: dict[str, Tensor], schedule: dict[str, Any]) -> None:
        """Continue from what `tensors` and `schedule_state` gave. The rate is that of this
        optimizer's own schedule after as many steps."""
        own: dict[str, dict[str, Tensor]] = {"master": dict(self._masters)}
        begun = any(not key.endswith(".master") for key in tensors)
        states = {
            name: empty_state(self._optimizer, master)
            for name, master in self._masters.items()
            if begun
        }
        for name, state in states.items():
            for kind, value in state.items():
                own.setdefault(kind, {})[name] = value
        pieces = {kind: self._ranks.pieces(cut) for kind, cut in own.items()}
        with torch.no_grad():
            for key, value in tensors.items():
                name, _, kind = key.rpartition(".")
                part = value if kind == "step" else self._ranks.part(name, value)
                pieces[kind][name].copy_(part)
        for name, state in states.items():
            put_state(self._optimizer, self._masters[name], state)
        done = {name: schedule[name] for name in ("last_epoch", "_step_count")}
        self._schedule.load_state_dict({**self._schedule.state_dict(), **done})
        given = zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        rates = [base * share(self._schedule.last_epoch) for base, share in given]
        self._schedule._last_lr = rates
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _schedule(optimizer: Any, section: OptimizerSection, total_steps: int) -> Any:
    """transformers' schedule of this name, ending at `ends_at` of each group's rate."""
    name, given, end = section.schedule, {}, section.ends_at
    if name == "constant":
        name = "constant_with_warmup"
    elif end and name == "linear" and section.warmup_steps < total_steps:
        name, given = "polynomial", {"lr_end": optimizer.defaults["lr"] * end, "power": 1.0}
    elif end and name != "linear":
        name, given = "cosine_with_min_lr", {"min_lr_rate": end}
    return get_scheduler(
        name,
        optimizer=optimizer,
        num_warmup_steps=section.warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=given,
    )
