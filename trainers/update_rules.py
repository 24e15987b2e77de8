"""The optimizers of a recipe, as torch or bitsandbytes has them, over fp32 masters by name.

`adamw` is applied element by element, so that an element's update does not depend on the tensor it
is in. `adamw_8bit` scales blocks of 256 elements and `muon` multiplies whole matrices: both need
tensors that no rank cuts. Each is a function of weights, gradients and state on one device with one
version of its library; `muon` on a CPU also with one number of threads. In none do bits depend on
micro-batches or on the number of processes.
Sources: Loshchilov and Hutter (arXiv 1711.05101); Dettmers et al., 8-bit optimizers (2110.02861);
Jordan et al., Muon (2024), and Liu et al., its rate for matrices (2502.16982).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.trainers.config.learning_sections import MuonSection, OptimizerSection

Groups = Sequence[tuple[Mapping[str, nn.Parameter], float]]
"""Masters by name, and their weight decay."""


def build_optimizer(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    """The optimizer that a recipe names. ValueError where it cannot update these masters.

    On a GPU AdamW is torch's fused one, elsewhere the plain loop: one formula, rounded differently.
    Foreach is not used: its choice of path, hence its rounding, depends on the other tensors of the
    list.
    """
    if (muon := section.of_muon) is not None:
        return _muon(section, muon, groups)
    given = _given(groups)
    settings: dict[str, Any] = {"lr": section.learning_rate}
    settings |= {"betas": section.betas, "eps": section.eps}
    if section.name == "adamw_8bit":
        return _bitsandbytes().optim.AdamW8bit(given, **settings)
    fused = all(master.is_cuda for group, _ in groups for master in group.values())
    return torch.optim.AdamW(given, **settings, foreach=False, fused=fused)


def _given(groups: Groups) -> list[dict[str, Any]]:
    return [{"params": list(g.values()), "weight_decay": decay} for g, decay in groups]


def _bitsandbytes() -> Any:
    """The library without the kernels that it fetches from a hub where `kernels` is installed."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # of their lack
    there = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # pyright: ignore[reportArgumentType]
    try:
        return import_module("bitsandbytes")
    finally:
        del sys.modules["kernels"]
        if there is not None:
            sys.modules["kernels"] = there


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW that step as one. Groups and states are those of the two."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        self.both = (muon, adamw)
        groups = [group for part in self.both for group in part.param_groups]
        super().__init__([{**group} for group in groups], {"lr": muon.defaults["lr"]})
        self.param_groups = groups
        muon.state = adamw.state = self.state

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self.both:
            part.step()


def check_optimizer(section: OptimizerSection, parameters: Mapping[str, Tensor]) -> None:
    """ValueError where the optimizer cannot update parameters of these names and shapes."""
    if section.name != "muon":
        return
    inner = _inner(parameters)
    if stacked := [name for name in sorted(inner) if parameters[name].dim() != 2]:
        shape = list(parameters[stacked[0]].shape)
        problem = f"{stacked[0]} is {shape}, and torch.optim.Muon takes matrices only"
        raise ValueError(f"optimizer.name muon: {problem}: use adamw or adamw_8bit")
    if not inner or inner == parameters.keys():
        problem = "the policy needs matrices in its layers, and weights outside of them"
        raise ValueError(f"optimizer.name muon: {problem}: use adamw")


def _inner(parameters: Mapping[str, Tensor]) -> set[str]:
    """Names of the matrices of the layers."""
    return {name for name, p in parameters.items() if ".layers." in name and p.dim() > 1}


def _muon(section: OptimizerSection, own: MuonSection, groups: Groups) -> MuonWithAdamW:
    check_optimizer(section, {name: p for group, _ in groups for name, p in group.items()})
    matrices, others = [], []
    for group, decay in groups:
        inner = _inner(group)
        for to, names in ((matrices, inner), (others, group.keys() - inner)):
            if names:
                to.append(({name: p for name, p in group.items() if name in names}, decay))
    muon = torch.optim.Muon(
        _given(matrices),
        lr=section.learning_rate,
        momentum=own.momentum,
        adjust_lr_fn=own.adjust_lr_fn,
    )
    rest = section.model_copy(
        update={"name": "adamw", "learning_rate": own.adamw_learning_rate or section.learning_rate}
    )
    adamw = build_optimizer(rest, others)
    assert isinstance(adamw, torch.optim.AdamW)
    return MuonWithAdamW(muon, adamw)


def state_of(optimizer: torch.optim.Optimizer, master: nn.Parameter) -> dict[str, Tensor]:
    """What an optimizer keeps of a master, by its own names; {} before a first step."""
    kept = optimizer.state.get(master, {}).items()
    return {key: torch.as_tensor(value) for key, value in kept if key not in _CONSTANT}


_CONSTANT = ("qmap1", "qmap2")  # bitsandbytes' tables of the 256 values


def empty_state(optimizer: Any, master: nn.Parameter) -> dict[str, Tensor]:
    """The state of a master before a first step, to be filled and given to `put_state`."""
    place, index, group = next(
        (place, index, group)
        for place, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter is master
    )
    if hasattr(optimizer, "init_state"):
        optimizer.init_state(group, master, place, index)
        return state_of(optimizer, master)
    if "ns_steps" in group:
        return {"momentum_buffer": torch.zeros_like(master)}
    at = master.device if group["fused"] else None
    moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=at), **moments}


def put_state(optimizer: Any, master: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    """Let an optimizer continue from the state of a master."""
    optimizer.state[master].update(state)
    if hasattr(optimizer, "init_state"):
        optimizer.state[master]["step"] = int(state["step"])
