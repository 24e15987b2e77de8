"""Passes through captured layers that fail, or must be refused, lose nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_consistency.models.captured_layers import CapturedLayers
from rl_consistency.models.layer_graphs import CAPTURED_AT, MOST_MOVES, layers_op_by_op
from tests.models.captured.passes import BATCHES, alone, captured_for, gradients, loss, same
from tests.models.captured.recorded_graphs import recorded


def test_an_error_after_the_layers_leaves_a_step_that_is_not_continued(model):
    captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    embedding = model.model.embed_tokens.weight

    def fail(_):
        raise RuntimeError("of a hook")

    handle = embedding.register_hook(fail)
    with pytest.raises(RuntimeError, match="of a hook"):
        loss(model, BATCHES[0], 2).backward()
    handle.remove()
    with pytest.raises(ValueError, match="ended in an error"):
        loss(model, BATCHES[0], 2).backward()
    expected = alone(model, 3)
    loss(model, BATCHES[0], 3).backward()
    assert same(gradients(model), expected)


def failing_after_the_replay(monkeypatch, error):
    """Let the next replay of a backward pass end in an error."""
    backward = CapturedLayers.backward

    def fail(*given):
        backward(*given)
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(CapturedLayers, "backward", fail)


def test_a_failed_pass_leaves_the_gradients_of_others_alone(model, monkeypatch):
    weight = model.model.layers[0].self_attn.q_proj.weight
    first, both = alone(model, 1), alone(model, 1, 3)
    captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    value = loss(model, BATCHES[0], 2)
    failing_after_the_replay(monkeypatch, RuntimeError("of a replay"))
    with pytest.raises(RuntimeError, match="of a replay"):
        torch.autograd.grad(value, [weight])
    assert same(gradients(model), first)
    loss(model, BATCHES[0], 3).backward()
    assert same(gradients(model), both)


def test_a_stopped_pass_leaves_kept_gradients_alone_and_is_done(model, monkeypatch):
    first = alone(model, 1)
    graphs = captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    kept = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    value = loss(model, BATCHES[0], 2)
    failing_after_the_replay(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        value.backward()
    assert same(kept, first) and not graphs._is_busy()


def test_a_hook_that_comes_between_two_passes_is_no_error(model):
    expected = alone(model, 1, 2)
    captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    model.model.layers[0].self_attn.q_proj.weight.register_hook(lambda gradient: None)
    loss(model, BATCHES[0], 2).backward()
    assert same(gradients(model), expected)


@pytest.mark.parametrize("what", ["exchanged", "resized", "moved"])
def test_memory_that_was_taken_away_is_refused(model, what):
    graphs = captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    a, b = (model.model.layers[i].mlp.up_proj.weight for i in (0, 1))
    assert graphs.replays == 1
    captured = graphs._gradients
    own = next(x for p, x in zip(captured.parameters, captured._own, strict=True) if p is a)
    # `.grad` is a rounded copy where sums are wider: of fp32 models on a GPU.
    assert (a.grad.data_ptr() == own.data_ptr()) == (a.grad.dtype == own.dtype)
    if what == "exchanged":
        a.grad, b.grad = b.grad, a.grad
    elif what == "resized":
        own.untyped_storage().resize_(0)
        model.zero_grad(set_to_none=True)
    value = loss(model, BATCHES[0], 2)
    if what == "moved":
        a.data = a.data.clone()
    with pytest.raises(ValueError, match=what if what != "exchanged" else "of another one"):
        value.backward()


def test_weights_that_move_again_and_again_end_the_captures(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    graphs = recorded(model)
    with pytest.warns(UserWarning, match="moved or frozen again and again"):
        for _ in range(MOST_MOVES + 2):
            for _ in range(CAPTURED_AT):
                loss(model, BATCHES[0]).backward()
            weight.data = weight.data.clone()
    assert len(graphs) == 0 and graphs._gradients is None


def test_threads_that_score_together_get_their_own_scores(model):
    with torch.no_grad(), layers_op_by_op():
        expected = [loss(model, BATCHES[0], seed) for seed in range(6)]
    captured_for(model)

    def score(seed):
        with torch.no_grad():
            return loss(model, BATCHES[0], seed)

    with ThreadPoolExecutor(3) as pool:
        assert same(list(pool.map(score, range(6))), expected)


def test_anomaly_detection_and_a_failed_capture_run_op_by_op(model, monkeypatch):
    expected = alone(model, 1)
    graphs = captured_for(model)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss(model, BATCHES[0], 1).backward()
    assert graphs.replays == 0 and same(gradients(model), expected)

    def fail(*_):
        raise RuntimeError("invalidated")

    monkeypatch.setattr(CapturedLayers, "capture", fail)
    graphs = recorded(model)
    for _ in range(CAPTURED_AT - 1):
        loss(model, BATCHES[0]).backward()
    with pytest.raises(RuntimeError, match="invalidated"):
        loss(model, BATCHES[0])
    model.zero_grad(set_to_none=True)
    loss(model, BATCHES[0], 1).backward()
    assert same(gradients(model), expected)
