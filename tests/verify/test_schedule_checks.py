"""The comparison of schedules, its pointer kernels in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from rl_consistency.cases import case as op_setup
from rl_consistency.cases import launches
from rl_consistency.cases.case import TINY_SHAPES, Heads
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.experts import route as router_schedules
from rl_consistency.kernels.experts import schedules as expert_schedules
from rl_consistency.kernels.experts.products_triton import MOST_STEPS
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul import schedules as matmul_schedules
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.verify.checks import routing_schedules as routing_schedule_checks
from rl_consistency.verify.checks import row_schedules as row_schedule_checks
from rl_consistency.verify.checks import schedules as schedule_checks
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import schedules_alike
from rl_consistency.verify.mutants import schedule_perturbations
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


HIDDEN, INNER = routing_schedule_checks.HIDDEN, routing_schedule_checks.INNER
ROUTED = routing_schedule_checks.ROUTED


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Small enough for the interpreter."""
    monkeypatch.setattr(schedule_checks, "LENGTHS", (1, 18))
    # On CPU tensors the public functions are the CPU's own schedules.
    for module in (schedule_checks, launches):
        monkeypatch.setattr(
            module,
            "matmul_nt",
            lambda a, b, *, bias, out_dtype: matmul_fwd(a, b, bias, "nt", out_dtype),
        )
    monkeypatch.setattr(
        schedule_checks,
        "matmul_nn",
        lambda a, b, *, out_dtype: matmul_fwd(a, b, None, "nn", out_dtype),
    )
    tables = {
        matmul_schedules: {"POINTER_FP32": 4},
        launches.few_rows: {"QKV": 3, "GATE_UP": -3},
        schedule_checks.attention_schedules: {
            "PREFILL": -2,
            "DECODE": -2,
            "BACKWARD_QUERIES": -2,
            "BACKWARD_KEYS": -2,
        },
        expert_schedules: {"PRODUCTS": 2, "GATE_UP": 2, "FOLDS": 2},
    }
    for module, names in tables.items():
        for name, count in names.items():
            table = getattr(module, name)
            monkeypatch.setattr(module, name, table[:count] if count > 0 else table[count:])
    sizes = {"EXPERTS": 5, "HIDDEN": 40, "INNER": 24, "SUMMED": 600, "ROUTED": 12}
    sizes["CALLS"] = {23: ([20, 1], [3, 17]), 3: ([2, 0], [1, 1])}
    for name, size in sizes.items():
        monkeypatch.setattr(routing_schedule_checks, name, size)


PRODUCTS = (
    schedule_checks.check_matmul_schedules,
    schedule_checks.check_fused_product_schedules,
    schedule_checks.check_gradient_fold_schedules,
)
OTHERS = (schedule_checks.check_attention_schedules, schedule_checks.check_token_logprobs_schedules)
ROWS = (
    row_schedule_checks.check_glu_schedules,
    row_schedule_checks.check_rotary_schedules,
    row_schedule_checks.check_rms_norm_schedules,
    row_schedule_checks.check_gradient_row_schedules,
    row_schedule_checks.check_sampling_schedules,
    routing_schedule_checks.check_router_schedules,
)
EXPERTS = (
    routing_schedule_checks.check_expert_schedules,
    routing_schedule_checks.check_expert_gradient_schedules,
)
FOLDS = (
    schedule_checks.check_gradient_fold_schedules,
    row_schedule_checks.check_gradient_row_schedules,
)
"""They need several steps, or tokens that repeat; the others are slower."""


def judged(check, **changes):
    return counted(Tally(), check, **changes)


def is_red(check):
    with pytest.raises(Red):
        counted(UpToTheFirst(), check)
    return True


def counted(tally, check, **changes):
    # Tables of schedules for 16 bits, but for these.
    half = check not in PRODUCTS[::2] + OTHERS
    setup = replace(SETUP, dtype=torch.bfloat16 if half else torch.float32)
    if check in FOLDS:
        setup = replace(setup, sweep=replace(QUICK, lengths=(1, 40)))
    check(tally, replace(setup, **changes))
    return tally


def integers(shape, dtype=torch.float32, seed=0, *, scale=1.0, device="cpu"):
    """The interpreter multiplies tiles by numpy, in no order of ours; these sum exactly in all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("check", PRODUCTS + EXPERTS, ids=lambda c: c.__name__)
def test_pointer_schedules_agree_in_the_interpreter(check, monkeypatch):
    for module in (schedule_checks, routing_schedule_checks, op_setup):
        monkeypatch.setattr(module, "probe", integers)
    tally = judged(check)
    assert tally.cases > 2
    assert tally.detail == ""


@pytest.mark.thorough
@pytest.mark.parametrize("check", ROWS, ids=lambda c: c.__name__)
def test_schedules_without_a_product_agree_in_the_interpreter(check):
    tally = judged(check)
    assert tally.cases >= 2
    assert tally.detail == ""


@pytest.mark.thorough
@pytest.mark.parametrize("check", OTHERS, ids=lambda c: c.__name__)
def test_pointer_schedules_run_in_the_interpreter(check):
    assert judged(check).cases > 2


@pytest.mark.parametrize("check", PRODUCTS + OTHERS + ROWS[:-1], ids=lambda c: c.__name__)
def test_one_entry_of_another_order_turns_the_check_red(check):
    with schedule_perturbations.one_schedule_of_another_order.perturb():
        assert is_red(check)


ALONE = {
    "qkv_fwd": schedule_checks.check_fused_product_schedules,
    "gate_up_glu_fwd": schedule_checks.check_fused_product_schedules,
    "glu_fwd": row_schedule_checks.check_glu_schedules,
    "glu_bwd": row_schedule_checks.check_glu_schedules,
    "rotary_fwd": row_schedule_checks.check_rotary_schedules,
    "rms_norm_fwd": row_schedule_checks.check_rms_norm_schedules,
    "rms_norm_bwd": row_schedule_checks.check_rms_norm_schedules,
    "launch_rows": row_schedule_checks.check_gradient_row_schedules,
    "vocabulary_support": row_schedule_checks.check_sampling_schedules,
    "choose_fwd": routing_schedule_checks.check_router_schedules,
    "logits_bwd": routing_schedule_checks.check_router_schedules,
    "product_fwd": routing_schedule_checks.check_expert_schedules,
    "gate_up_fwd": routing_schedule_checks.check_expert_schedules,
    "combine_fwd": routing_schedule_checks.check_expert_schedules,
    "pair_bwd": routing_schedule_checks.check_expert_gradient_schedules,
    "fold_runs": routing_schedule_checks.check_expert_gradient_schedules,
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
        assert judged(row_schedule_checks.check_rms_norm_schedules).mismatches == 2


@pytest.fixture
def library(monkeypatch):
    """The library path on CPU tensors, in front of it the interpreter as the canonical order."""
    monkeypatch.setattr(matmul_schedules, "CANDIDATES", matmul_schedules.POINTER[:2])
    for module in (schedule_checks, op_setup):
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
    return judged(schedule_checks.check_matmul_schedules, dtype=torch.bfloat16)


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
    monkeypatch.setattr(audit, "due", lambda: False)
    assert "0 elements of 0 audited calls, 2 products by the library" in products_judged().detail


def test_a_library_without_a_certificate_is_no_red_row(library):
    library(differing=1)
    assert products_judged().detail == ""


def test_an_entry_of_another_order_is_named():
    values = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4) + 2**-20]
    tally = Tally()
    schedules_alike(tally, "rows", range(3), values.__getitem__)
    assert tally.mismatches == 1
    assert tally.detail.startswith("rows, 2: row 0")


def test_an_entry_too_large_for_the_device_is_left_out_but_not_all_of_them():
    def run(limit, entry):
        if entry >= limit:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return torch.ones(1)

    tally = Tally()
    schedules_alike(tally, "x", range(3), lambda entry: run(2, entry))
    assert tally.mismatches == 0
    schedules_alike(tally, "x", range(3), lambda entry: run(1, entry))
    assert tally.detail == "x, entries that fit: 1 of 3"
    with pytest.raises(ValueError, match="no schedule of 3 fits"):
        schedules_alike(tally, "x", range(3), lambda entry: run(0, entry))


def test_sizes_of_router_and_experts_admit_every_entry_of_their_tables():
    assert HIDDEN % MOST_STEPS == 2 * INNER % MOST_STEPS == 0  # else none by descriptor in "nn"
    assert expert_schedules.pair_candidates(INNER) == expert_schedules.PAIR
    block = expert_schedules.block_experts(ROUTED)
    assert router_schedules.candidates(block) == router_schedules.ALL
