"""The comparison of schedules, its pointer kernels in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from rl_consistency.cases import case as op_setup
from rl_consistency.cases import launches
from rl_consistency.cases.case import TINY_SHAPES, Heads
from rl_consistency.cases.launches import Launch
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.experts import route as router_schedules
from rl_consistency.kernels.experts import schedules as expert_schedules
from rl_consistency.kernels.experts.products_triton import MOST_STEPS
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul import schedules as matmul_schedules
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.verify.checks import schedules
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import judged as judged_by
from rl_consistency.verify.laws import launch_alike
from rl_consistency.verify.mutants import schedule_perturbations
from rl_consistency.verify.run import SCHEDULE_CHECKS
from rl_consistency.verify.substitution import substituted
from rl_consistency.verify.sweep import QUICK, OpSetup
from tests.verify.test_mutants import Red, UpToTheFirst

# The interpreter subtracts infinities in numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SETUP = OpSetup(
    dtype=torch.float32,
    sweep=replace(QUICK, lengths=(1, 5)),
    shapes=replace(TINY_SHAPES, linear=((40, 24),), attention=(Heads(2, 1, 16),), vocab_size=131),
)


HIDDEN, INNER, ROUTED = schedules.HIDDEN, schedules.INNER, schedules.ROUTED
CHECKS = dict(SCHEDULE_CHECKS)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Small enough for the interpreter."""
    # On CPU tensors the public functions are the CPU's own schedules.
    for module in (schedules, launches):
        monkeypatch.setattr(
            module,
            "matmul_nt",
            lambda a, b, *, bias, out_dtype: matmul_fwd(a, b, bias, "nt", out_dtype),
        )
    monkeypatch.setattr(
        schedules,
        "matmul_nn",
        lambda a, b, *, out_dtype: matmul_fwd(a, b, None, "nn", out_dtype),
    )
    attention = dict.fromkeys(("PREFILL", "DECODE", "BACKWARD_QUERIES", "BACKWARD_KEYS"), -2)
    tables = {
        matmul_schedules: {"POINTER_FP32": 4},
        launches.few_rows: {"QKV": 3, "GATE_UP": -3},
        schedules.attention_schedules: attention,
        expert_schedules: {"PRODUCTS": 2, "GATE_UP": 2, "FOLDS": 2},
    }
    for module, names in tables.items():
        for name, count in names.items():
            table = getattr(module, name)
            monkeypatch.setattr(module, name, table[:count] if count > 0 else table[count:])
    sizes = {"EXPERTS": 5, "HIDDEN": 40, "INNER": 24, "SUMMED": 600, "ROUTED": 12}
    sizes["CALLS"] = {23: ([20, 1], [3, 17]), 3: ([2, 0], [1, 1])}
    for name, size in {"LENGTHS": (1, 18), **sizes}.items():
        monkeypatch.setattr(schedules, name, size)


PRODUCTS = ("matmul", "fused products", "gradient fold")
OTHERS = ("attention", "token_logprobs")
ROWS = ("glu", "rotary", "rms_norm", "gradient rows", "sampling", "router")
EXPERTS = ("experts", "experts backward")
FOLDS = ("gradient fold", "gradient rows")
"""They need several steps, or tokens that repeat; the others are slower."""


def is_red(check):
    with pytest.raises(Red):
        judged(check, UpToTheFirst())
    return True


def judged(check, tally=None, **changes):
    # Tables of schedules for 16 bits, but for these.
    half = check not in ("matmul", "gradient fold", *OTHERS)
    setup = replace(SETUP, dtype=torch.bfloat16 if half else torch.float32)
    if check in FOLDS:
        setup = replace(setup, sweep=replace(QUICK, lengths=(1, 40)))
    tally = tally or Tally()
    CHECKS[check](tally, replace(setup, **changes))
    return tally


def integers(shape, dtype=torch.float32, seed=0, *, scale=1.0, device="cpu"):
    """The interpreter multiplies tiles by numpy, in no order of ours; these sum exactly in all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("check", PRODUCTS + EXPERTS)
def test_pointer_schedules_agree_in_the_interpreter(check, monkeypatch):
    for module in (schedules, op_setup):
        monkeypatch.setattr(module, "probe", integers)
    tally = judged(check)
    assert tally.cases > 2
    assert tally.detail == ""


@pytest.mark.thorough
@pytest.mark.parametrize("check", ROWS)
def test_schedules_without_a_product_agree_in_the_interpreter(check):
    tally = judged(check)
    assert tally.cases >= 2
    assert tally.detail == ""


@pytest.mark.thorough
@pytest.mark.parametrize("check", OTHERS)
def test_pointer_schedules_run_in_the_interpreter(check):
    assert judged(check).cases > 2


@pytest.mark.parametrize("check", PRODUCTS + OTHERS + ROWS[:-1])
def test_one_entry_of_another_order_turns_the_check_red(check):
    with schedule_perturbations.one_schedule_of_another_order.perturb():
        assert is_red(check)


ALONE = {
    "qkv_fwd": "fused products",
    "gate_up_glu_fwd": "fused products",
    "glu_fwd": "glu",
    "glu_bwd": "glu",
    "rotary_fwd": "rotary",
    "rms_norm_fwd": "rms_norm",
    "rms_norm_bwd": "rms_norm",
    "launch_rows": "gradient rows",
    "vocabulary_support": "sampling",
    "choose_fwd": "router",
    "logits_bwd": "router",
    "product_fwd": "experts",
    "gate_up_fwd": "experts",
    "combine_fwd": "experts",
    "pair_bwd": "experts backward",
    "fold_runs": "experts backward",
}
PAIRS = schedule_perturbations._small_launchers() + schedule_perturbations._expert_launchers()


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_each_wrong_launcher_is_noticed_by_itself(pair):
    with substituted(*pair):
        assert is_red(ALONE[pair[0].__name__])


def test_a_wrong_backward_of_the_norm_is_noticed_with_heads_and_without():
    (pair,) = (pair for pair in PAIRS if pair[0].__name__ == "rms_norm_bwd")
    with substituted(*pair):
        setup = replace(SETUP, dtype=torch.bfloat16)
        tallies = [judged_by(launch_alike, launch) for launch in schedules.norms(setup)]
    assert [tally.mismatches > 0 for tally in tallies] == [False, True, False, True]


@pytest.fixture
def library(monkeypatch):
    """The library path on CPU tensors, in front of it the interpreter as the canonical order."""
    monkeypatch.setattr(matmul_schedules, "CANDIDATES", matmul_schedules.POINTER[:2])
    for module in (schedules, op_setup):
        monkeypatch.setattr(module, "probe", integers)
    # The CPU's memory starts on 64 bytes, a GPU's on 256.
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 64)
    monkeypatch.setattr(cublaslt, "settings_in_force", lambda: True)
    monkeypatch.setattr(cublaslt, "_has_room", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "library_product", matmul_fwd)
    monkeypatch.setattr(audit, "_counts", audit._Counts())

    monkeypatch.setattr(findings_module, "_by_device", {})

    def certified(differing):
        monkeypatch.setattr(cublaslt, "compare", lambda device, key, m: differing)

    return certified


def products_judged():
    return judged("matmul", dtype=torch.bfloat16)


def test_every_product_of_the_library_is_audited(library):
    library(differing=0)
    tally = products_judged()
    assert tally.detail == ""
    report = audit.schedule_audit()
    assert report.audited == report.calls == 2
    assert audit.AUDIT_EVERY > 1


def test_a_library_of_another_order_turns_the_check_red(library, monkeypatch):
    library(differing=0)
    monkeypatch.setattr(
        cublaslt, "library_product", lambda *operands: matmul_fwd(*operands) * (1 + 2**-7)
    )
    tally = products_judged()
    assert "by the library: row 0" in tally.detail
    assert tally.mismatches == 3  # both layouts, and the audit


def test_a_library_that_nothing_audits_turns_the_check_red(library, monkeypatch):
    library(differing=0)
    monkeypatch.setattr(audit, "sample", lambda name, run, again: run())
    assert "0 elements of 0 audited calls, 2 products by the library" in products_judged().detail


def test_a_library_without_a_certificate_is_no_red_row(library):
    library(differing=1)
    assert products_judged().detail == ""


def compared(*calls):
    """The tally of a launch by these candidates."""
    table = {str(i): call for i, call in enumerate(calls)}
    launch_alike(tally := Tally(), Launch(op="x", shape={}, operands=tuple, candidates=table))
    return tally


def too_large():
    raise OutOfResources(300_000, 232_448, "shared memory")


def test_an_entry_of_another_order_is_named():
    values = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4) + 2**-20]
    tally = compared(*(lambda value=value: value for value in values))
    assert (tally.mismatches, tally.detail) == (1, "x, 2: 12 of 12 elements differ from 0")


def test_results_that_are_not_finite_are_red():
    assert compared(*[lambda: torch.tensor([torch.nan])] * 2).mismatches == 2


def test_an_entry_too_large_for_the_device_is_left_out_but_not_all_of_them():
    one = lambda: torch.ones(1)  # noqa: E731
    assert compared(too_large, one, one).mismatches == 0
    assert compared(one, too_large, too_large).detail == "x, entries that fit: 1 of 3"
    with pytest.raises(ValueError, match="no schedule of 3 fits"):
        compared(too_large, too_large, too_large)


def test_sizes_of_router_and_experts_admit_every_entry_of_their_tables():
    assert HIDDEN % MOST_STEPS == 2 * INNER % MOST_STEPS == 0  # else none by descriptor in "nn"
    assert expert_schedules.pair_candidates(INNER) == expert_schedules.PAIR
    block = expert_schedules.block_experts(ROUTED)
    assert router_schedules.candidates(block) == router_schedules.ALL
