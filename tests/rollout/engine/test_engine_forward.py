"""What changes the forward pass beside its weights: cached keys do not outlive it."""

import pytest
import torch

from rl_consistency.models import modules
from rl_consistency.models.inventory import ForwardWatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import mismatched

PROMPT = list(range(1, 30))
PARAMS = SamplingParams(n=2, max_tokens=9, seed=4)


@pytest.fixture
def model(tiny_qwen3):
    with patch(built := tiny_qwen3()):
        yield built


@pytest.fixture
def precision():
    """Sets the process's precision of matrix products; undone after the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def steered(model):
    """A vector that a hook adds to the first layer's output."""
    vector = torch.zeros(model.config.hidden_size)
    model.model.layers[0].register_forward_hook(lambda module, given, output: output + vector)
    return vector


def test_what_a_hook_reads_may_change_between_rollouts(engine, model):
    vector = steered(model)
    for _ in range(3):
        assert mismatched(engine, model, [PROMPT], PARAMS) == 0
        vector += 0.1


def test_keys_kept_beside_a_hook_are_caught(engine, model, monkeypatch):
    """Negative control."""
    read = ForwardWatch.read

    def unseeing(self):
        return read(self)._replace(hooked=False)

    monkeypatch.setattr(ForwardWatch, "read", unseeing)
    vector = steered(model)
    assert mismatched(engine, model, [PROMPT], PARAMS) == 0
    vector += 0.1
    assert mismatched(engine, model, [PROMPT], PARAMS) > 0


def test_an_attribute_written_during_a_rollout_is_an_error(engine, model):
    def changed(*_):
        model.model.layers[1].self_attn.scaling = 0.5

    with pytest.raises(ConsistencyError, match=r"during generation.* has scaling=0\.5"):
        engine.generate([PROMPT], PARAMS, progress=changed)
    assert not engine.has_unfinished


def test_a_numeric_setting_is_checked_wherever_a_number_begins(engine, model, precision):
    ids = torch.tensor([PROMPT])
    scored, logits = token_logprobs(model, ids, prompt_lengths=[1]), model(input_ids=ids).logits
    precision("medium")
    for compute in (
        lambda: scored.logprobs.sum().backward(),
        lambda: logits.sum().backward(),
        lambda: engine.generate([PROMPT], PARAMS),
        lambda: engine.submit([PROMPT], PARAMS),
        lambda: RolloutEngine(model, eos_token_id=None),
        lambda: token_logprobs(model, ids, prompt_lengths=[1]),
        lambda: model(input_ids=ids),
    ):
        with pytest.raises(ConsistencyError, match="float32_matmul_precision is 'medium'"):
            compute()
    precision("highest")
    assert mismatched(engine, model, [PROMPT], PARAMS) == 0


def test_a_numeric_setting_written_during_a_rollout_is_an_error(engine, precision):
    steps = []

    def changed(*_):
        steps.append(1)
        precision("highest" if len(steps) > 1 else "medium")

    with pytest.raises(ConsistencyError, match="float32_matmul_precision is 'medium'"):
        engine.generate([PROMPT], PARAMS, progress=changed)
    assert not engine.has_unfinished


@pytest.mark.parametrize("op", ["rms_norm", "rotary"])
def test_a_stock_norm_or_rotation_of_a_head_is_none_of_the_fused_op(op, engine, monkeypatch):
    """With either on its stock path a paged layer runs the parts one by one."""
    calls = []
    fused = modules.paged_inputs

    def counted(*args, **named):
        calls.append(1)
        return fused(*args, **named)

    monkeypatch.setattr(modules, "paged_inputs", counted)
    engine.generate([PROMPT], PARAMS)
    assert calls
    calls.clear()
    with strict(except_={op}):
        engine.generate([PROMPT], PARAMS)
    assert not calls
