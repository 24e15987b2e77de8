"""AdamW over fp32 weights, whatever the policy's dtype, with clipping in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.strategies.strategy import Strategy, by_decay


class GradientNormError(ValueError):
    """Gradients that are not finite; no weight was changed."""


class PolicyOptimizer:
    """torch's AdamW and a transformers schedule.

    A bf16 or fp16 policy is updated through fp32 master weights, which are rounded into the policy
    after every step; an fp32 policy is its own master. Where ranks keep shards, a rank updates its
    own. Norms' weights and biases are a group of their own, without decay unless `decay_norms`.

    On a GPU the update is torch's fused one, elsewhere the plain loop. Either is one formula
    applied element by element, so that an element's update does not depend on the tensor it is in;
    the two round differently. Foreach is not used: its choice of path, hence its rounding, depends
    on the other tensors of the list.
    """

    def __init__(self, ranks: Strategy, section: OptimizerSection, *, total_steps: int):
        self._ranks, self._max_norm = ranks, section.max_grad_norm
        groups = by_decay(ranks.masters(), ranks.decays)
        self._masters = {name: master for group in groups for name, master in group.items()}
        decayed = [bool(section.decay_norms or ranks.decays & group.keys()) for group in groups]
        self._adamw = torch.optim.AdamW(
            [
                {"params": list(group.values()), "weight_decay": section.weight_decay * decay}
                for group, decay in zip(groups, decayed, strict=True)
            ],
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.eps,
            foreach=False,
            fused=all(master.is_cuda for master in self._masters.values()),
        )
        self._schedule: Any = get_scheduler(
            "constant_with_warmup" if section.schedule == "constant" else section.schedule,
            optimizer=self._adamw,
            num_warmup_steps=section.warmup_steps,
            num_training_steps=total_steps,
        )
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
                f"the gradient norm is {norm}; no weight was changed, and --resume would end here "
                "again. Look for extreme rewards, or begin a run at an earlier checkpoint "
                "(policy.path) with a lower learning rate."
            )
        self.begun += 1
        if self._max_norm is not None and norm > self._max_norm:
            for gradient in gradients.values():
                gradient.mul_(self._max_norm / norm)
        self._ranks.update(self._adamw, self._masters, gradients)
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
            for key, value in {**self._adamw.state.get(master, {}), **parts}.items():
                if isinstance(value, Tensor):
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
        """Continue from what `tensors` and `schedule_state` gave."""
        own: dict[str, Any] = {}
        for kind in dict.fromkeys(key.rpartition(".")[2] for key in tensors):
            empty = torch.zeros_like if kind != "step" else lambda master: torch.zeros(())
            own[kind] = {name: empty(master) for name, master in self._masters.items()}
        if "master" in own:
            own["master"] = self._masters
        pieces = {kind: self._ranks.pieces(cut) for kind, cut in own.items()}
        with torch.no_grad():
            for key, value in tensors.items():
                name, _, kind = key.rpartition(".")
                part = value if kind == "step" else self._ranks.part(name, value)
                pieces[kind][name].copy_(part)
        own.pop("master", None)
        states = {i: {k: cut[n] for k, cut in own.items()} for i, n in enumerate(self._masters)}
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": states, "param_groups": groups})
        self._schedule.load_state_dict({**self._schedule.state_dict(), **schedule})
        rates = self._schedule.get_last_lr()
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
