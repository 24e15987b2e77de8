"""A rollout that is tuned in its middle has the tokens, logprobs and fingerprint of any other."""

import pytest
import torch

from rl_consistency.kernels.core.findings import findings_of
from rl_consistency.kernels.matmul import op, product_triton
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import POINTER_FP32
from rl_consistency.models.patch import patch
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.tuning import measure
from rl_consistency.tuning.policy_works import policy_works
from rl_consistency.tuning.tune import tune_works
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.substitution import substituted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 300], [9]]
SAMPLING = SamplingParams(max_tokens=4, seed=1)


class SlowestFirst:
    """A bench on which the op's own choice is the slowest, so that every work gets another one."""

    def copies(self, operand_bytes):
        return 1

    def free_bytes(self):
        return 1e12

    def prepare(self, calls):
        pass

    def timers(self, calls):
        return {name: self.timer(0.9**i) for i, name in enumerate(calls)}

    def timer(self, seconds):
        return lambda i: seconds


@pytest.fixture
def interpreted(monkeypatch):
    """The forward products of this test by the interpreter -> names of the schedules that ran."""
    ran = []
    launch = product_triton.launch_options

    def noted(schedule):
        ran.append(schedule.name)
        return launch(schedule)

    def product(a, b, *, bias=None, out_dtype=torch.float32):
        return matmul_fwd(a, b, bias, "nt", out_dtype)

    monkeypatch.setattr(product_triton, "launch_options", noted)
    with substituted(op.matmul_nt, product):
        yield ran


def rolled_out(model, *, tune_after=None):
    """(prompt, tokens, logprobs as bytes) of every completion; tuned after so many steps."""
    engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=16)
    engine.submit(PROMPTS, SAMPLING)
    steps, found = 0, []
    while engine.has_unfinished:
        if steps == tune_after:
            tuned(model)
        found += engine.step()
        steps += 1
    assert tune_after is None or steps > tune_after + 1
    return sorted((tuple(c.token_ids), c.token_logprobs.numpy().tobytes()) for c in found)


def tuned(model):
    works = policy_works(model.config, torch.float32, CPU, 2)
    works = [w for w in works if w.op == "matmul" and "/nt/" in w.entry]
    report = tune_works(works, SlowestFirst(), findings_of(CPU), clock=lambda: 0.0)
    assert report.passed and all(o.winner != o.default for o in report.outcomes)


@pytest.mark.thorough
def test_tuning_in_the_middle_of_a_rollout_changes_no_bit(interpreted, monkeypatch):
    monkeypatch.setattr(measure, "FINAL_ROUNDS", (2, 2))
    state = torch.get_rng_state()
    with patch(model := build_preset("tiny-qwen3")):
        before, digest = rolled_out(model), fingerprint().digest
        assert set(interpreted) == {POINTER_FP32[0].name}
        interpreted.clear()
        assert rolled_out(model, tune_after=2) == before
        assert fingerprint().digest == digest
        assert {w.schedule for w in findings_of(CPU).winners.values()} <= set(interpreted)
        assert len(set(interpreted)) > 1
    assert torch.equal(torch.get_rng_state(), state)
