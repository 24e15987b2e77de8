"""Tuning on a GPU: winners have the default's bytes, and a rollout tuned in its middle its own."""

import json
from functools import partial

import pytest
import torch

from rl_consistency.cases import launches
from rl_consistency.cases.case import Setting
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import (
    Winner,
    findings_of,
    forget_picks,
)
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import candidates, pick
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.tuning import tune as tuning
from rl_consistency.tuning.stopwatch import ColdDevice
from rl_consistency.tuning.tune import tune, tune_device

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = Setting(dtype=BF16, device=DEVICE)
PROMPTS = [[(7 * i + 3 * n) % 331 for i in range(n)] for n in (1, 5, 33, 64, 130)]
SAMPLING = SamplingParams(n=2, max_tokens=24, seed=3)


@pytest.fixture(autouse=True)
def own_cache(fresh_certificates, tmp_path):
    forget_picks()
    yield tmp_path
    forget_picks()


def works_of(dtype):
    """A few works of each kind."""
    on = Setting(dtype=dtype, device=DEVICE)
    found = [
        *(launches.product(on, way, m, 512, 1024) for way in ("nt", "nn") for m in (1, 64)),
        launches.product(on, "nt", 512, 1024, 512, FP32),
        launches.outer(on, 512, 256, 512),
        launches.qkv(on, 16, (256, 128, 128), 256),
        launches.gate_up(on, 16, 512, 256),
        *(launches.gated(on, way, 300, 512, "silu") for way in ("forward", "backward")),
        launches.rotation(on, 300, 4, 2, 64),
        *(launches.norm_forward(on, 300, 1024, adds=adds) for adds in (False, True)),
        *(launches.norm_backward(on, 300, 1024, adds=adds) for adds in (False, True)),
    ]
    # The head's fused products are tuned where descriptors are.
    if dtype != FP32 and has_tma(DEVICE):
        found += [launches.head(on, kind, 300, 1024, 256) for kind in ("statistics", "gradient")]
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_candidate_has_the_bytes_of_the_default_and_no_winner_is_slower(dtype):
    works = works_of(dtype)
    report = tune_device(works, DEVICE, budget=600.0)
    assert report.passed and report.left_out == {}
    assert len(report.outcomes) == len(works)
    for outcome in report.outcomes:
        assert outcome.gain >= 1.0 and outcome.winner_us > 0, outcome
        assert outcome.winner in outcome.work.candidates
    again = tune_device(works, DEVICE, budget=600.0)
    assert again.passed and all(outcome.known for outcome in again.outcomes)


def test_winners_are_kept_for_the_next_process(own_cache):
    tune_device(works_of(BF16)[:2], DEVICE, budget=600.0)
    works = [work.entry for work in works_of(BF16)[:2]]
    kept = [findings_of(DEVICE).finding(work) for work in works]
    (file,) = own_cache.rglob("findings/*.json")
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert set(works) <= set(json.loads(file.read_text())["winners"])
    findings_module._by_device.clear()
    assert [findings_of(DEVICE).finding(work) for work in works] == kept and all(kept)


@pytest.mark.parametrize("m", [1, 40, 600])
def test_every_candidate_that_wins_runs_with_the_same_bytes(m):
    n, k = 512, 1024
    a, b = launches.product(HALF, "nt", m, n, k).operands()
    right = b.t().contiguous()
    tma = "/tma/" in launches.product(HALF, "nt", m, n, k).entry
    for layout, weight, run in (("nt", b, matmul_nt), ("nn", right, matmul_nn)):
        expected = matmul_fwd(a, weight, None, layout, BF16)
        entry = launches.product(HALF, layout, m, n, k).entry
        for schedule in candidates(m, BF16, tma=tma):
            findings_of(DEVICE).keep(entry, Winner(schedule.name, 1.0, 2.0))
            assert pick(m, n, k, BF16, layout, tma, BF16, DEVICE) == schedule
            assert same_bytes(run(a, weight, out_dtype=BF16), expected), schedule


def as_bytes(completions):
    return [(list(c.token_ids), c.token_logprobs.numpy().tobytes()) for c in completions]


def trained(model):
    """Logprobs and gradients of a training step."""
    model.zero_grad()
    sequences = [(prompt * 4)[:512] for prompt in PROMPTS]
    found = token_logprobs(model, sequences, prompt_lengths=[1] * len(sequences)).logprobs
    found.sum().backward()
    return [found.detach().clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_rollout_tuned_in_its_middle_has_the_same_tokens_and_logprobs(
    small_model, dtype, monkeypatch
):
    monkeypatch.setattr(tuning, "FINAL_ROUNDS", (3, 3))
    with patch(model := small_model(dtype, vocab_size=336)):

        def engine():
            return RolloutEngine(model, eos_token_id=None, num_kv_blocks=400)

        expected, digest = as_bytes(engine().generate(PROMPTS, SAMPLING)), fingerprint(DEVICE)
        gradients = trained(model)
        state = torch.cuda.get_rng_state(DEVICE)
        running = engine()
        running.submit(PROMPTS, SAMPLING)
        steps, found, report = 0, [], None
        while running.has_unfinished:
            if steps == 5:
                report = tune(model, rows=512, budget=600.0)
            found += running.step()
            steps += 1
        assert report is not None and report.passed and len(report.outcomes) > 10
        found.sort(key=lambda c: (c.prompt_index, c.sample_index))
        assert as_bytes(found) == expected
        assert as_bytes(engine().generate(PROMPTS, SAMPLING)) == expected
        assert all(same_bytes(a, b) for a, b in zip(trained(model), gradients, strict=True))
        assert fingerprint(DEVICE) == digest
        assert torch.equal(torch.cuda.get_rng_state(DEVICE), state)


def test_a_bench_is_cold_and_times_more_work_as_longer():
    bench = ColdDevice(DEVICE)
    works = [launches.product(HALF, "nt", m, 4096, 4096) for m in (16, 8192)]
    seconds = []
    with numeric_settings(), torch.no_grad():
        for work in works:
            call = work.candidates[work.default]
            operands = work.operands()
            copies = bench.copies(sum(x.nbytes for x in operands))
            timer = bench.timers({"": [partial(call, *operands)] * copies})[""]
            seconds.append(sorted(timer(i) for i in range(5))[2])
    assert 1e-6 < 3 * seconds[0] < seconds[1] < 0.1
