"""Every negative control turns its checks red, every check has one, and nothing stays behind."""

import sys

import pytest
import torch

from rl_consistency.cases.case import CPU
from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_varlen
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.verify import claims
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.mutants.mutant import Mutant
from rl_consistency.verify.mutants.perturbations import blockwise_attention
from rl_consistency.verify.mutants.run import MUTANTS, mutants_on, run_controls, run_mutant
from rl_consistency.verify.run import CHAIN_CHECKS, SCHEDULE_CHECKS, op_checks_in, process_checks
from rl_consistency.verify.sweep import OpSetup
from tests.comparison import assert_within


def bindings():
    """What every name in every loaded module and class of the package is bound to."""
    found = {}
    for path, module in list(sys.modules.items()):
        if path.startswith("rl_consistency."):
            for name, value in vars(module).items():
                if name.startswith("__"):
                    continue
                found[path, name] = value
                if isinstance(value, type) and value.__module__ == path:
                    found |= {(path, name, own): v for own, v in vars(value).items()}
    return found


def changed(before, after):
    return [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]


class Red(ConsistencyError):
    """A comparison of a check failed."""


class UpToTheFirst(Tally):
    """Ends a check at its first failure, which settles that it is red."""

    def expect(self, case, holds, detail=""):
        super().expect(case, holds, detail)
        if self.mismatches == 1 and not holds:
            raise Red(self.detail)
        return holds


QUICK = ("row-dependent tile", "stock silu", "embedding shuffled", "ties to the higher id")


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.thorough)
        for m in mutants_on(CPU)
    ],
)
def test_the_mutant_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(claims, "Tally", UpToTheFirst)
    result = run_mutant(mutant)
    assert result.killed, result.survivors


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_mutant_is_undone_on_an_error(mutant):
    before = bindings()
    with pytest.raises(RuntimeError), mutant.perturb():
        assert changed(before, bindings())
        raise RuntimeError
    assert changed(before, bindings()) == []


def test_every_check_has_a_mutant_on_either_device():
    keys = {c.key for c in process_checks() + op_checks_in(OpSetup(dtype=torch.float32))}
    keys |= {f"{claim} {subject}" for claim, subject, *_ in CHAIN_CHECKS}
    assert keys == {key for mutant in mutants_on(CPU) for key in mutant.keys(CPU)}
    cuda = torch.device("cuda")
    keys |= {f"C1 schedules: {op}" for op, _ in SCHEDULE_CHECKS}
    assert keys == {key for mutant in mutants_on(cuda) for key in mutant.keys(cuda)}


def test_a_mutant_that_changes_nothing_survives():
    from contextlib import nullcontext

    harmless = Mutant(name="none", what="", perturb=nullcontext, caught_by=("C1 embedding",))
    result = run_mutant(harmless)
    assert not result.killed
    assert result.survivors == ("C1 embedding",)


def test_controls_are_green_without_a_mutant_and_leave_settings_alone():
    before = fingerprint()
    results = run_controls(["C7 fingerprint", "C7 one function", "C3 chain, recomputed"])
    assert [r for r in results if not r.passed] == []
    assert before.difference(fingerprint()) == []


def test_the_attention_of_the_controls_is_attention():
    """Wrong in its order alone: the controls must not turn checks red by being no attention."""
    q, k, v = (probe((50, heads, 16), seed=i, scale=0.05) for i, heads in enumerate((4, 2, 2)))
    layout = PackedSequences.of([0, 32], [20, 18])
    for options in ({}, {"block": 7}, {"at_padding": True}):
        out, lse = blockwise_attention(q, k, v, layout, 0.25, 9, **options)
        expected, stats = attention_varlen(q, k, v, layout, scale=0.25, window=9)
        own = [*range(20), *range(32, 50)]
        assert_within(out[own], expected[own], "attention", torch.float32)
        assert_within(lse[own], stats[own], "attention", torch.float32)


def test_an_unknown_check_is_an_error():
    with pytest.raises(ValueError, match="no check 'C9 nothing'"):
        run_controls(["C9 nothing"])
