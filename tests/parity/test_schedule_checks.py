"""The comparison of schedules, its pointer kernels in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from rl_consistency.kernels import matmul_schedules
from rl_consistency.kernels.matmul_triton import matmul_fwd
from rl_consistency.parity import perturbations, schedule_checks
from rl_consistency.parity.claims import Tally
from rl_consistency.parity.op_setup import TINY_SHAPES, Heads, OpSetup
from rl_consistency.parity.sweep import QUICK

SETUP = OpSetup(
    dtype=torch.float32,
    sweep=replace(QUICK, lengths=(1, 5)),
    shapes=replace(TINY_SHAPES, linear=((40, 24),), attention=(Heads(2, 1, 16),), vocab_size=131),
)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Small enough for the interpreter."""
    monkeypatch.setattr(schedule_checks, "LENGTHS", (1, 18))
    # On CPU tensors the public functions are the CPU's own schedules.
    monkeypatch.setattr(
        schedule_checks,
        "matmul_nt",
        lambda a, b, *, bias, out_dtype: matmul_fwd(a, b, bias, "nt", out_dtype),
    )
    monkeypatch.setattr(
        schedule_checks,
        "matmul_nn",
        lambda a, b, *, out_dtype: matmul_fwd(a, b, None, "nn", out_dtype),
    )
    tables = {
        schedule_checks.matmul_schedules: {"POINTER_FP32": 4},
        schedule_checks.attention_schedules: {
            "PREFILL": -2,
            "DECODE": -2,
            "BACKWARD_QUERIES": -2,
            "BACKWARD_KEYS": -2,
        },
    }
    for module, names in tables.items():
        for name, count in names.items():
            table = getattr(module, name)
            monkeypatch.setattr(module, name, table[:count] if count > 0 else table[count:])


CHECKS = (
    schedule_checks.check_matmul_schedules,
    schedule_checks.check_gradient_fold_schedules,
    schedule_checks.check_attention_schedules,
    schedule_checks.check_token_logprobs_schedules,
)


def judged(check):
    tally = Tally()
    # The fold needs several steps; the others are slower.
    folds = check is schedule_checks.check_gradient_fold_schedules
    check(tally, replace(SETUP, sweep=replace(QUICK, lengths=(1, 40))) if folds else SETUP)
    return tally


def integers(shape, dtype=torch.float32, seed=0, *, scale=1.0, device="cpu"):
    """The interpreter multiplies tiles by numpy, in no order of ours; these sum exactly in all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("check", CHECKS[:2], ids=lambda c: c.__name__)
def test_pointer_schedules_agree_in_the_interpreter(check, monkeypatch):
    monkeypatch.setattr(schedule_checks, "probe", integers)
    tally = judged(check)
    assert tally.cases > 2
    assert tally.detail == ""


@pytest.mark.parametrize("check", CHECKS[2:], ids=lambda c: c.__name__)
def test_pointer_schedules_run_in_the_interpreter(check):
    assert judged(check).cases > 2


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_one_entry_of_another_order_turns_the_check_red(check):
    with perturbations.one_schedule_of_another_order():
        assert judged(check).mismatches > 0


def test_an_entry_of_another_order_is_named():
    values = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4) + 2**-20]
    tally = Tally()
    schedule_checks._compare(tally, "rows", range(3), values.__getitem__)
    assert tally.mismatches == 1
    assert tally.detail.startswith("rows, 2: row 0")


def test_an_entry_too_large_for_the_device_is_left_out_but_not_all_of_them():
    def run(limit, entry):
        if entry >= limit:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return torch.ones(1)

    tally = Tally()
    schedule_checks._compare(tally, "x", range(3), lambda entry: run(2, entry))
    assert tally.mismatches == 0
    schedule_checks._compare(tally, "x", range(3), lambda entry: run(1, entry))
    assert tally.detail == "x, entries that fit: 1 of 3"
    with pytest.raises(ValueError, match="no schedule of 3 fits"):
        schedule_checks._compare(tally, "x", range(3), lambda entry: run(0, entry))


def test_every_table_has_entries_for_every_dtype():
    assert len(matmul_schedules.CANDIDATES) > 30
    assert len({*matmul_schedules.CANDIDATES}) == len(matmul_schedules.CANDIDATES)
