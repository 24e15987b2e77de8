"""The verification on a GPU: a small run of every check is green, and mutants turn checks red."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rl_consistency.cases.case import TINY_SHAPES
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul import schedules as matmul_schedules
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.verify.checks.schedules import check_matmul
from rl_consistency.verify.claims import CLAIMS, Tally
from rl_consistency.verify.mutants.run import mutants_on, run_controls, run_mutant
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.run import (
    OP_CHECKS,
    PROCESS_CHECKS,
    SCHEDULE_CHECKS,
    chain_rows,
    run_checks,
)
from rl_consistency.verify.sweep import QUICK, OpSetup, Sweep
from rl_consistency.verify.targets import Target

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
TINY = Sweep(
    batches=(1, 4), lengths=(1, 17, 33), long=(300,), chunks=(7,), pads=(0, 3), cache_blocks=(7, 16)
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_claim_holds_for_a_tiny_model_in_several_processes(dtype):
    target = Target(
        name="tiny-qwen3",
        dtype=dtype,
        device=CUDA,
        sweep=TINY,
        build=partial(build_preset, "tiny-qwen3", dtype, device=CUDA),
    )
    results = run_checks([target], processes=4)
    assert [(r.key, r.detail) for r in results if not r.passed] == []
    tables = PROCESS_CHECKS, OP_CHECKS, SCHEDULE_CHECKS, chain_rows(dtype)
    assert len(results) == sum(map(len, tables))
    assert {r.claim for r in results} == set(CLAIMS)


@pytest.mark.parametrize("mutant", mutants_on(CUDA), ids=lambda m: m.name)
def test_the_mutant_is_caught(mutant):
    result = run_mutant(mutant, CUDA)
    assert result.killed, result.survivors


def test_controls_are_green_without_a_mutant():
    keys = dict.fromkeys(key for mutant in mutants_on(CUDA) for key in mutant.keys(CUDA))
    assert [(r.key, r.detail) for r in run_controls(keys, CUDA) if not r.passed] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_the_library_are_audited_and_another_order_is_found(
    dtype, monkeypatch, fresh_certificates
):
    monkeypatch.setattr(matmul_schedules, "CANDIDATES", matmul_schedules.POINTER[:2])
    shapes = replace(TINY_SHAPES, linear=((1024, 1024),))
    setup = OpSetup(dtype=dtype, device=CUDA, sweep=QUICK, shapes=shapes)
    right, wrong, library = Tally(), Tally(), cublaslt.library_product
    with numeric_settings():
        check_matmul(right, setup)
        assert right.detail == ""
        report = audit.schedule_audit()
        assert report.audited == report.calls > 0
        monkeypatch.setattr(
            cublaslt, "library_product", lambda *operands: library(*operands) * (1 + 2**-7)
        )
        check_matmul(wrong, setup)
    assert wrong.mismatches > 0
    assert audit.schedule_audit().differing > 0


def test_a_model_of_real_shape_is_built_on_the_device_and_moves_no_random_state():
    states = torch.random.get_rng_state(), torch.cuda.get_rng_state(CUDA)
    model = build_preset("qwen3-0.6b", torch.bfloat16, device=CUDA, num_layers=2)
    assert {p.device for p in model.parameters()} == {CUDA}
    weight = model.model.layers[0].mlp.up_proj.weight.detach().float()
    sizes = weight.square().mean(0).sqrt().sort().values
    assert sizes[-1] > 3 * sizes[len(sizes) // 2]
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(CUDA), states[1])
