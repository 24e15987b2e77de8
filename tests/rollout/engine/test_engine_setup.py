"""Settings of the engine, names it makes up, CUDA streams, and graphs captured ahead of time."""

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import engine_of

PARAMS = SamplingParams(max_tokens=5)
SIZES = {"num_kv_blocks": 64, "max_num_seqs": 6}


@pytest.fixture
def engine(model):
    return engine_of(model, **SIZES)


def test_inference_mode_is_refused_where_it_would_fail_later(model, tiny_qwen3):
    with torch.inference_mode(), pytest.raises(ValueError, match="outside torch.inference_mode"):
        engine_of(model)
    with torch.inference_mode():
        frozen = tiny_qwen3()
    with patch(frozen), pytest.raises(ValueError, match="made under torch.inference_mode"):
        engine_of(frozen)


# Names.


def test_made_up_request_ids_keep_clear_of_the_callers(engine):
    engine.submit([[1], [2]], PARAMS, request_ids=["request-0", "request-2"], prompt_ids=[0, 1])
    made_up = [engine.submit([[3], [4]], PARAMS, prompt_ids=[first, first + 1]) for first in (2, 4)]
    assert made_up == [["request-1", "request-3"], ["request-4", "request-5"]]


def test_a_request_is_unfinished_until_it_is_handed_out(engine):
    engine.submit([[1]], PARAMS, request_ids=["a"])
    engine.cancel("a")
    with pytest.raises(ValueError, match="the engine has 1 unfinished requests"):
        engine.generate([[1]], PARAMS)
    with pytest.raises(ValueError, match="request id 'a' .* not finished"):
        engine.submit([[1]], PARAMS, request_ids=["a"])
    assert [c.finish_reason for c in engine.step()] == ["cancelled"]
    assert len(engine.generate([[1]], PARAMS, request_ids=["a"])) == 1


# CUDA streams: on a CPU there are none, so the runner is told of some.


def test_a_step_on_another_stream_than_the_first_is_refused(engine, monkeypatch):
    runner = engine._runner
    current = 1
    monkeypatch.setattr(runner, "_current_stream", lambda: current)
    assert len(engine.generate([[1]], PARAMS)) == 1
    engine.submit([[1]], PARAMS)
    engine.step()
    current = 2
    with pytest.raises(ValueError, match="began on CUDA stream 1 and a step was asked for on 2"):
        engine.step()
    assert not engine.has_unfinished
    assert len(engine.generate([[1]], PARAMS)) == 1  # each rollout on a stream of its own


# Graphs.


@pytest.fixture
def captures(monkeypatch):
    """Every graph asked for, as (rows, width, truncates, shared)."""
    asked = []

    def captured(self, shape):
        asked.append((shape.rows, shape.width, shape.truncates, shape.shared))

    monkeypatch.setattr(DecodeGraphs, "captured", captured)
    return asked


def with_graphs(engine):
    """The engine as it is on a GPU, where it has a place for graphs."""
    runner = engine._runner
    runner.decode_graphs = DecodeGraphs(*runner.parts, capacity=64)
    return engine


def test_a_warm_up_captures_what_decoding_replays(engine, captures):
    with_graphs(engine).warm_up(PARAMS)
    assert captures == [(rows, 1, False, False) for rows in (6, 4, 2, 1)]
    captures.clear()
    engine.warm_up(SamplingParams(top_p=0.9, speculation=3), batch_sizes=[5])
    assert captures == [(6, 4, True, False), (6, 1, True, False)]


@pytest.mark.parametrize(
    "n, shares, expected", [(2, True, True), (1, True, False), (2, False, False)]
)
def test_a_warm_up_for_groups_captures_calls_that_share_keys(
    model, captures, monkeypatch, n, shares, expected
):
    monkeypatch.setattr(DecodeGraphs, "share_keys", True)
    engine = with_graphs(engine_of(model, **SIZES, enable_prefix_sharing=shares))
    engine.warm_up(SamplingParams(n=n), batch_sizes=[4, 1])
    assert captures == [(4, 1, False, expected), (1, 1, False, False)]


def test_a_warm_up_is_refused_in_the_middle_or_beyond_the_seats(engine):
    with pytest.raises(ValueError, match=r"1 to max_num_seqs=6, got \[0, 7\]"):
        engine.warm_up(PARAMS, batch_sizes=[0, 1, 7])
    engine.submit([[1]], PARAMS)
    with pytest.raises(ValueError, match="1 unfinished requests.*before the next warm_up"):
        engine.warm_up(PARAMS)


def test_hooks_and_another_patch_drop_the_graphs(engine, model, monkeypatch):
    dropped = []
    monkeypatch.setattr(DecodeGraphs, "drop", lambda self: dropped.append(1))
    with_graphs(engine)
    engine._runner.begin()
    assert not dropped
    with model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output):
        engine._runner.begin()
        engine._runner.begin()  # what the hook reads may be other than before
        assert len(dropped) == 2
    engine._runner.begin()
    assert len(dropped) == 3
