"""Products by a winner are audited by samples, and a winner of other bytes is struck."""

import pytest
import torch

from rl_consistency.kernels.core.cache import tuned_schedules as winners_module
from rl_consistency.kernels.core.cache.tuned_schedules import Winner, forget_picks, tuned_schedules
from rl_consistency.kernels.matmul import audit, op, product_triton
from rl_consistency.kernels.matmul.audit import schedule_audit, withdrawn_since
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import POINTER, pick, product_work
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

BF16, CPU = torch.bfloat16, torch.device("cpu")
M, N, K = 20, 48, 96
WORK = product_work("nt", BF16, BF16, False, M, N, K)
OTHER = next(s for s in POINTER if s is not pick(M, N, K, BF16, "nt", False))


@pytest.fixture
def operands(monkeypatch):
    """a and b; the interpreter computes their products, and every call by a winner is audited."""
    monkeypatch.setattr(winners_module, "_by_device", {})
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    monkeypatch.setattr(audit, "AUDIT_EVERY", 1)
    monkeypatch.setattr(op, "matmul_op", matmul_fwd)
    monkeypatch.setattr(op.cublaslt, "product", lambda *operands: None)
    forget_picks()
    generator = torch.Generator().manual_seed(0)
    yield tuple(torch.randn(s, generator=generator).bfloat16() for s in ((M, K), (N, K)))
    forget_picks()


def product(operands):
    return op._cuda_product(*operands, None, "nt", BF16)


def test_without_a_winner_nothing_is_audited(operands):
    product(operands)
    assert schedule_audit().calls == 0


def test_a_winner_runs_with_the_same_bytes_and_is_audited(operands, monkeypatch):
    expected, ran = product(operands), []
    launch = product_triton.launch_options
    monkeypatch.setattr(product_triton, "launch_options", lambda s: [launch(s), ran.append(s)][0])
    tuned_schedules(CPU).keep(WORK, Winner(OTHER.name, 1.0, 2.0))
    assert same_bytes(product(operands), expected)
    assert ran[0].name.startswith(OTHER.name.rpartition("-s")[0]) and len(ran) == 2
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing) == (1, 1, 0)
    assert report.struck == report.struck_schedules == []


def test_a_product_of_a_transposed_weight_is_audited_where_it_found_its_winner(operands):
    a, b = operands
    b = b.t().contiguous().t()
    assert not b.is_contiguous()
    tuned_schedules(CPU).keep(WORK, Winner(OTHER.name, 1.0, 2.0))
    product((a, b))
    assert schedule_audit().audited == 0  # read as [K, N], whose rule has no winner
    work = product_work("nn", BF16, BF16, False, M, N, K)
    tuned_schedules(CPU).keep(work, Winner(OTHER.name, 1.0, 2.0))
    product((a, b))
    assert schedule_audit().audited == 1


def test_a_wrong_winner_in_the_cache_is_found_struck_and_not_used_again(operands, monkeypatch):
    """The mutant: a cache names a candidate whose product is wrong on this device."""
    expected = product(operands)

    def wrong(a, b, bias, layout, out_dtype, schedule=None):
        chosen = schedule or pick(len(a), N, K, BF16, layout, False, out_dtype, CPU)
        return matmul_fwd(a, b, bias, layout, out_dtype, schedule) * (
            1.01 if chosen == OTHER else 1.0
        )

    monkeypatch.setattr(op, "matmul_op", wrong)
    tuned_schedules(CPU).keep(WORK, Winner(OTHER.name, 1.0, 2.0))
    assert not same_bytes(product(operands), expected)
    report = schedule_audit()
    name = f"{WORK}: {OTHER.name}"
    assert report.differing > 0 and report.struck == report.struck_schedules == [name]
    # The engine drops its graphs and keys: the generation has moved.
    assert withdrawn_since(0) == [name]
    assert tuned_schedules(CPU).winner(WORK) is None
    assert same_bytes(product(operands), expected)
