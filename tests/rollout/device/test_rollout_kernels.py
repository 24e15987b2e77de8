"""Which kernels are compiled ahead: the sizes that stand for all others. On a GPU see tests/gpu."""

import pytest
import torch

from rl_consistency.kernels.matmul.schedules import pick, pick_gate_up, pick_qkv, prefers_library
from rl_consistency.models import decoder
from rl_consistency.models.patch import patch
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.device.ragged_call import RaggedCall, RaggedShape
from rl_consistency.rollout.device.rollout_bounds import RolloutBounds, ragged_shapes, row_counts
from rl_consistency.rollout.device.rollout_kernels import RolloutKernels
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset, preset_config

BF16 = torch.bfloat16
BOUNDS = RolloutBounds(tokens=2048, sequences=256, longest=32768, batch_sizes=(1, 256))


@pytest.fixture(scope="module")
def model():
    with patch(found := build_preset("tiny-qwen3", torch.float32)):
        yield found


def weights_of(name):
    """[n, k] of the products of a model."""
    config = preset_config(name)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * head, config.num_key_value_heads * head
    return {(heads, hidden), (kv_heads, hidden), (hidden, heads), (inner, hidden), (hidden, inner)}


def picks(rows, shapes):
    """What the rules pick for so many rows."""
    found = {(n, k, pick(rows, n, k, BF16, "nt", True)) for n, k in shapes}
    found |= {(n, k, prefers_library(rows, n, k, BF16, "nt")) for n, k in shapes}
    return found | {pick_qkv(rows, BF16), pick_gate_up(rows, 8960, BF16, True)}


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen3-0.6b"])
def test_the_numbers_of_rows_meet_nearly_all_schedules_of_any_number(name):
    """A schedule is one kernel for all weights. What is met by no entry may compile later."""
    shapes, most = weights_of(name), 8192
    met = set().union(*(picks(rows, shapes) for rows in row_counts(most)))
    kernels = {found[-1] for found in met if isinstance(found, tuple)}
    for rows in [*range(1, 300, 7), *range(300, most, 97)]:
        missed = {f[-1] for f in picks(rows, shapes) if isinstance(f, tuple)} - kernels
        assert not missed, rows


def test_numbers_of_rows_are_multiples_of_16_and_others():
    found = row_counts(2048)
    assert found[:8] == [1, 2, 4, 8, 16, 17, 32, 33] and found[-1] == 2048
    assert {1 << n for n in range(12)} <= set(found) and len(found) < 70
    assert row_counts(1) == [1] and row_counts(20) == [1, 2, 4, 8, 16, 17, 20]


def test_shapes_stay_within_the_bounds_and_continue_a_past():
    shapes = list(ragged_shapes(BOUNDS))
    for shape in shapes:
        assert shape.sequences * shape.queries <= 2048 and shape.sequences <= 256
        assert shape.past + shape.queries <= 32768
        assert 1 <= shape.sampled <= shape.sequences * shape.queries
    assert {shape.past > 0 for shape in shapes} == {True, False}
    short = RolloutBounds(tokens=100, sequences=2, longest=30, batch_sizes=(1,))
    assert all(s.queries + s.past <= 30 and s.sequences <= 2 for s in ragged_shapes(short))


@pytest.mark.parametrize(
    "shape",
    [
        RaggedShape(queries=5, sampled=2),
        RaggedShape(sequences=3, queries=2, past=17, sampled=6),
        RaggedShape(queries=1, past=40),
    ],
)
def test_a_call_of_padding_touches_no_sequence(model, shape):
    runner = ModelRunner(model, block_size=4, num_blocks=20, max_num_seqs=3)
    caches = [*runner._cache.keys, *runner._cache.values]
    state = runner._state
    before = [cache[:-1].clone() for cache in caches], state.last_tokens[:-1].clone()
    call = RaggedCall.padding(shape, state, 4)
    assert len(call.arrays["token_ids"]) == shape.sequences * shape.queries
    values, rows = runner._run(call, list(range(shape.sampled)), truncates=False)
    assert values.shape == (2, shape.sampled) and len(rows) == shape.sampled
    assert all(cache[:-1].equal(old) for cache, old in zip(caches, before[0]))
    assert state.last_tokens[:-1].equal(before[1])
    assert not state._stale


def test_layers_that_differ_in_what_they_launch_are_kinds_of_their_own(model):
    layers = model.model.layers
    assert next(index for index, _ in decoder._one_of_each_kind(layers)) == 0
    alike = torch.nn.ModuleList([layers[0]] * 3)
    assert [index for index, _ in decoder._one_of_each_kind(alike)] == [0]
    window, layers[1].self_attn.window = layers[1].self_attn.window, 8
    try:
        both = torch.nn.ModuleList([layers[0], layers[1]])
        assert [index for index, _ in decoder._one_of_each_kind(both)] == [0, 1]
    finally:
        layers[1].self_attn.window = window


def test_the_first_rollout_of_a_kind_asks_for_the_sizes_it_has(model, monkeypatch):
    asked = []
    compiled = RolloutKernels._compile
    monkeypatch.setattr(
        RolloutKernels, "_compile", lambda self, *a: (asked.append(a), compiled(self, *a))
    )
    engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=60, max_num_seqs=5)
    plain, truncated = SamplingParams(n=2, max_tokens=3), SamplingParams(top_k=3, max_tokens=3)
    for sampling in (plain, plain, truncated, truncated):
        engine.generate([[1, 2, 3], [4, 5]], sampling)
    kinds = [(truncates, shares) for _, _, truncates, shares, _ in asked]
    assert kinds == [(False, True), (True, False)]
    bounds = asked[0][0]
    assert (bounds.tokens, bounds.sequences, bounds.longest) == (10, 4, 6)
    assert bounds.batch_sizes == (1, 2, 4)
    engine.warm_up(plain, batch_sizes=[2, 5])
    assert asked[-1][0].batch_sizes == (2, 5) and asked[-1][0].tokens == 2048
    with pytest.raises(ValueError, match="batch sizes must be 1 to max_num_seqs=5"):
        engine.warm_up(plain, batch_sizes=[6])


def test_nothing_is_compiled_ahead_on_a_cpu(model):
    runner = ModelRunner(model, block_size=4, num_blocks=20, max_num_seqs=3)
    assert runner.compile_ahead(BOUNDS, also=[lambda: pytest.fail("called")]) == 0
