"""Works run as their ops do: the same bytes by every candidate, under the name that the op asks."""

import pytest
import torch

from rl_consistency.cases import launches
from rl_consistency.cases.case import Setting
from rl_consistency.cases.experts import expert_fold, expert_product
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings, Winner
from rl_consistency.kernels.experts.fold_triton import fold_runs
from rl_consistency.kernels.experts.products_triton import gate_up_fwd, product_fwd
from rl_consistency.kernels.gradient_fold.outer_triton import gradient_fold_outer
from rl_consistency.kernels.linear.few_rows_triton import gate_up_glu_fwd, qkv_fwd
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.pointwise.glu import glu_bwd, glu_fwd
from rl_consistency.kernels.pointwise.rotary import rotary_fwd
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd, rms_norm_fwd
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs import schedules as head_schedules
from rl_consistency.kernels.token_logprobs.cuda import choose_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
HALF = Setting(dtype=BF16)

CASES = {
    "nt": (
        lambda setting: launches.product(setting, "nt", 20, 48, 96),
        lambda a, b: matmul_fwd(a, b, None, "nt", a.dtype),
    ),
    "nn": (
        lambda setting: launches.product(setting, "nn", 3, 48, 96, FP32),
        lambda a, b: matmul_fwd(a, b, None, "nn", FP32),
    ),
    "fold": (
        lambda setting: launches.outer(setting, 48, 32, 40),
        lambda dy, x, g: gradient_fold_outer(g, dy, x, True),
    ),
    "qkv": (
        lambda setting: launches.qkv(setting, 5, (32, 16, 16), 48),
        lambda *given: qkv_fwd(*given, None, None, None),
    ),
    "gate_up": (
        lambda setting: launches.gate_up(setting, 5, 32, 48),
        lambda *given: gate_up_glu_fwd(*given, "silu"),
    ),
    "glu forward": (
        lambda setting: launches.gated(setting, "forward", 20, 48, "gelu"),
        lambda gate, up: glu_fwd(gate, up, "gelu"),
    ),
    "glu backward": (
        lambda setting: launches.gated(setting, "backward", 20, 48, "silu"),
        lambda dy, gate, up: glu_bwd(dy, gate, up, "silu"),
    ),
    "rotary": (
        lambda setting: launches.rotation(setting, 9, 4, 2, 16),
        lambda *given: rotary_fwd(*given, inverse=True),
    ),
    "experts gate_up": (
        lambda setting: expert_product(setting, "gate_up", 9, 2, 4, 24, 48, "gelu"),
        lambda a, w, first, pairs: gate_up_fwd(a, w, first, pairs, 2, "gelu", False),
    ),
    "experts nt": (
        lambda setting: expert_product(setting, "nt", 9, 2, 4, 24, 48),
        lambda a, w, first, pairs: product_fwd(a, w, "nt", first, pairs, 2, False),
    ),
    "experts nn": (
        lambda setting: expert_product(setting, "nn", 9, 2, 4, 24, 48, by_row=True),
        lambda a, w, first, pairs: product_fwd(a, w, "nn", first, pairs, 2, True),
    ),
    "experts fold": (
        lambda setting: expert_fold(setting, 40, 2, 4, 24, 48),
        lambda dy, x, places, rows, first, g: fold_runs(
            g, dy, x, places, rows, first, dy_by_row=False, fresh=True
        ),
    ),
    "norm": (
        lambda setting: launches.norm_forward(setting, 20, 64),
        lambda x, weight: rms_norm_fwd(x.view(5, 4, 64), None, weight, 1e-6),
    ),
    "norm and addition": (
        lambda setting: launches.norm_forward(setting, 20, 64, adds=True),
        lambda x, residual, weight: rms_norm_fwd(x, residual, weight, 1e-6),
    ),
    "norm backward": (
        lambda setting: launches.norm_backward(setting, 20, 512),
        lambda dy, x, weight, rstd: rms_norm_bwd(dy, None, x, weight, rstd, 1, True),
    ),
    "norm and addition backward": (
        lambda setting: launches.norm_backward(setting, 20, 512, adds=True),
        lambda dy, x, weight, rstd, dtotal: rms_norm_bwd(dy, dtotal, x, weight, rstd, 1, True),
    ),
}


class Noting(Findings):
    """Notes the works it is asked for."""

    def __init__(self):
        super().__init__(None, {})
        self.asked = []

    def winner(self, work):
        self.asked.append(work)
        return super().winner(work)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_op_asks_for_the_work_that_was_tuned(case, dtype, monkeypatch):
    make, op = CASES[case]
    monkeypatch.setitem(findings_module._by_device, CPU, store := Noting())
    work = make(Setting(dtype=dtype))
    assert store.asked == []  # its default is the op's rule alone
    op(*work.operands())
    assert store.asked == [work.entry]
    assert work.picked in work.candidates


@pytest.mark.parametrize("kind", ["statistics", "gradient"])
def test_the_head_asks_for_the_work_that_was_tuned(kind, monkeypatch):
    monkeypatch.setattr(head_schedules, "has_tma", lambda device: True)
    monkeypatch.setitem(findings_module._by_device, CPU, store := Noting())
    work = launches.head(HALF, kind, 20, 64, 48)
    hidden, weight = torch.zeros(20, 48, dtype=BF16), torch.zeros(64, 48, dtype=BF16)
    assert head_schedules.pick(hidden, weight, kind, 20) == work.picked == "tma"
    assert store.asked == [work.entry]
    store.keep(work.entry, Winner("tma pair", 1.0, 2.0))
    rows = SamplingRows.uniform(20)
    plan = choose_plan(hidden, weight, rows)
    assert getattr(plan, kind) == "tma pair" and {plan.statistics, plan.gradient} == {
        "tma", "tma pair",
    }  # fmt: skip
    assert head_schedules.pick(hidden.float(), weight.float(), kind, 20) == head_schedules.UNFUSED


def test_operands_are_the_same_each_time_and_leave_the_random_state():
    state = torch.get_rng_state()
    work = launches.product(HALF, "nt", 4, 8, 16)
    for a, b in zip(work.operands(), work.operands(), strict=True):
        assert (
            torch.equal(a, b)
            and a.data_ptr() != b.data_ptr()
            and a.abs().max() > 5 * a.abs().median()
        )
    assert torch.equal(torch.get_rng_state(), state)
