"""Running the negative controls: a mutant's checks inside it, and the same checks without it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from rl_consistency.cases.case import CPU
from rl_consistency.verify import run
from rl_consistency.verify.claims import Result
from rl_consistency.verify.mutants import (
    perturbations,
    routing_perturbations,
    schedule_perturbations,
)
from rl_consistency.verify.mutants.mutant import PRESET, Mutant
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.sweep import QUICK, OpSetup
from rl_consistency.verify.targets import Target

MUTANTS = tuple(
    value
    for module in (perturbations, routing_perturbations, schedule_perturbations)
    for value in vars(module).values()
    if isinstance(value, Mutant)
)
"""Every negative control. A check that no mutant can fail proves nothing; every check that a mutant
names must turn red, on a model that is built inside it."""


@dataclass(frozen=True, kw_only=True)
class MutantResult:
    """The checks that must turn red inside a mutant; those that stay green are its survivors."""

    mutant: Mutant
    results: tuple[Result, ...]

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(r.key for r in self.results if r.passed)

    @property
    def killed(self) -> bool:
        return bool(self.results) and not self.survivors


def mutants_on(device: torch.device) -> tuple[Mutant, ...]:
    """The mutants that a device can show."""
    return tuple(mutant for mutant in MUTANTS if mutant.keys(device))


def run_mutant(mutant: Mutant, device: torch.device = CPU) -> MutantResult:
    with mutant.perturb():
        results = run_controls(mutant.keys(device), device, mutant.preset)
    return MutantResult(mutant=mutant, results=tuple(results))


def run_controls(
    keys: Iterable[str], device: torch.device = CPU, preset: str = PRESET
) -> list[Result]:
    """Run some checks on the program as it is now, over a small sweep."""
    wanted = list(dict.fromkeys(keys))
    found: dict[str, Result] = {}
    for dtype in dict.fromkeys(_dtype_of(key, device) for key in wanted):
        group = [key for key in wanted if _dtype_of(key, device) == dtype]
        setup = OpSetup(dtype=dtype, device=device, sweep=QUICK)
        checks = (
            run.process_checks(device) + run.op_checks_in(setup) + run.schedule_checks_in(setup)
        )
        with ExitStack() as stack:
            if not {check.key for check in checks}.issuperset(group):
                build = partial(build_preset, preset, dtype, device=device)
                model = Target(name=preset, dtype=dtype, device=device, sweep=QUICK, build=build)
                checks += stack.enter_context(run.chain_checks_of(model))
            by_key = {check.key: check for check in checks}
            if unknown := [key for key in group if key not in by_key]:
                raise ValueError(f"no check {unknown[0]!r}; known: {', '.join(by_key)}.")
            found |= {key: by_key[key].run() for key in group}
    return [found[key] for key in wanted]


def _dtype_of(key: str, device: torch.device) -> torch.dtype:
    """fp32, in which no rounding hides a difference; but on a GPU an fp32 model adds its gradients
    up in fp64, which hides most of theirs, and lacks the schedules for operands of 16 bits."""
    half = device.type == "cuda" and key.startswith(("C3", "C1 schedules"))
    return torch.bfloat16 if half else torch.float32
