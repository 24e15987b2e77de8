"""The negative controls of the hash table: every wrong program must have several hashes."""

from __future__ import annotations

from collections.abc import Sequence

from rl_consistency.verify.claims import Result
from rl_consistency.verify.mutants.run import MutantResult
from rl_consistency.verify.mutants.world import WORLD_MUTANTS
from rl_consistency.verify.world.cells import Cell, Outcome, failures, left_out

CLAIM, DTYPE = "C4", "float32"


def control_cells(worlds: Sequence[int]) -> list[Cell]:
    """Each wrong program, and the right one, in every strategy that must show it."""
    keys = {"": strategies_shown(), **{m.name: _strategies(m.caught_by) for m in WORLD_MUTANTS}}
    return [
        Cell(dtype=DTYPE, strategy=strategy, micro_batch=4, world_size=world_size, mutant=mutant)
        for mutant, strategies in keys.items()
        for strategy in strategies
        for world_size in worlds
    ]


def strategies_shown() -> list[str]:
    """The strategies that a mutant must show in and that can be run here."""
    return _strategies([key for mutant in WORLD_MUTANTS for key in mutant.caught_by])


def judge(outcomes: Sequence[Outcome]) -> tuple[list[MutantResult], list[Result]]:
    """What each mutant's runs came to, and the same of the right program."""
    found = [
        MutantResult(mutant=mutant, results=tuple(_results(outcomes, mutant.name)))
        for mutant in WORLD_MUTANTS
    ]
    return found, _results(outcomes, "")


def _strategies(keys: Sequence[str]) -> list[str]:
    names = dict.fromkeys(key.removeprefix(f"{CLAIM} ") for key in keys)
    return [name for name in names if not left_out(name, DTYPE)]


def _results(outcomes: Sequence[Outcome], mutant: str) -> list[Result]:
    """The results of a mutant's runs, one per strategy."""
    own = [outcome for outcome in outcomes if outcome.cell.mutant == mutant]
    results = []
    for strategy in dict.fromkeys(outcome.cell.strategy for outcome in own):
        runs = [outcome for outcome in own if outcome.cell.strategy == strategy]
        failed = list(failures(runs))
        results.append(
            Result(
                claim=CLAIM,
                subject=strategy,
                scope="fp32",
                what="number of processes",
                cases=len(runs),
                mismatches=len(failed),
                passed=not failed,
                detail=f"{failed[0][0].cell.name}: {failed[0][1]}" if failed else "",
                figure=None,
                seconds=sum(outcome.seconds for outcome in runs),
            )
        )
    return results
