"""What a call checks on a GPU: weights read by their addresses, in one launch."""

import pytest
import torch
from torch import nn

from rl_consistency.kernels.reduction.weights_digest import PlacedDigest, fit, weights_digest
from rl_consistency.models.patch import patch
from rl_consistency.models.snapshot import Snapshot
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout import step_watch
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.step_watch import StepWatch
from rl_consistency.rollout.weights import model_digest

pytestmark = pytest.mark.gpu

PROMPT = [list(range(3, 40))]
SAMPLING = SamplingParams(max_tokens=12, seed=4)


@pytest.fixture(scope="module")
def model(small_model):
    with patch(built := small_model()):
        yield built


@pytest.fixture(scope="module")
def engine(model):
    return RolloutEngine(model, eos_token_id=None, max_num_seqs=4, num_kv_blocks=64)


def test_a_digest_by_addresses_is_that_of_the_tensors(model):
    named = list(model.named_parameters())
    assert fit([x for _, x in named]) and not fit([x.cpu() for _, x in named])
    assert not fit([x.t() for _, x in named if x.ndim == 2])
    placed = PlacedDigest(named)
    before = placed.launch()
    assert before() == placed.launch()() == weights_digest(named)
    weight = named[3][1].data.view(-1)
    kept = weight[-1].item()
    weight[-1] = kept + 1.0
    assert placed.launch()() == weights_digest(named) != before()
    weight[-1] = kept
    assert placed.launch()() == before()
    with torch.device("cuda"):
        assert PlacedDigest(named).launch()() == weights_digest(named) == before()


def test_the_engine_reads_the_digest_of_the_weights_where_they_lie_now(engine, model):
    linear = model.model.layers[1].mlp.up_proj
    for _ in range(2):  # the first makes the table of angles
        engine.generate(PROMPT, SAMPLING, weights_digest=model_digest(model))
    placed = engine._weights._placed
    assert placed.digest is not None
    with torch.no_grad():
        linear.weight.mul_(1.5)  # in place, as an optimizer does
    engine.generate(PROMPT, SAMPLING, weights_digest=model_digest(model))
    assert engine._weights._placed is placed and engine.stats.prefix_hit_tokens == 0
    linear.weight.data = linear.weight.data.clone()
    engine.generate(PROMPT, SAMPLING, weights_digest=model_digest(model))
    moved, kept = engine._weights._placed, linear.weight
    linear.weight = nn.Parameter(kept.detach() * 1.5)
    engine.generate(PROMPT, SAMPLING, weights_digest=model_digest(model))
    assert len({id(found) for found in (placed, moved, engine._weights._placed)}) == 3
    linear.weight = kept


@pytest.mark.parametrize("index", [(0, 0), (5, 3), (-1, -1)])
def test_a_write_that_leaves_no_version_is_an_error(engine, model, index, monkeypatch):
    memory, calls = model.model.layers[0].self_attn.k_proj.weight.data, []

    def write(*_):
        calls.append(1)
        if len(calls) == 3:
            memory[index] += 1.0

    monkeypatch.setattr(step_watch, "VALUES_EVERY", 10**6)  # what no step sees, the digest does
    with pytest.raises(ConsistencyError, match="during generation: their digest was .* and is"):
        engine.generate(PROMPT, SAMPLING, progress=write)


def test_a_step_sees_values_that_are_put_back(model):
    weights = list(model.named_parameters())
    watch = StepWatch(Snapshot(model), weights, placed=True)
    memory = weights[2][1].data
    assert watch.look() is None  # launched
    memory *= 1.5
    torch.cuda.synchronize()
    found = []
    for _ in range(step_watch.VALUES_EVERY + 2):
        found.append(watch.look())
        torch.cuda.synchronize()
    memory /= 1.5
    assert [change.what for change in found if change] == [f"{weights[2][0]} has other values"]
