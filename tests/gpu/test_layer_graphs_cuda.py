"""Training steps replayed from CUDA graphs, attention between them: the bytes of ops one by one."""

import warnings

import pytest
import torch

from rl_consistency.models import layer_graphs
from rl_consistency.models.layer_graphs import CAPTURED_AT, layers_op_by_op
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset
from tests.models.captured.passes import alone, captured_for, gradients, loss, same
from tests.models.captured.recorded_graphs import recorded
from tests.models.captured.test_failed_passes import *  # noqa: F403 (its tests, on a GPU)
from tests.models.captured.test_layer_graphs import *  # noqa: F403 (the same)

pytestmark = pytest.mark.gpu

BATCHES = ([700, 30, 2, 129], [1100], [17, 33] * 8, [250, 250, 250, 250])
"""Lengths that pass the key blocks of attention; several numbers of rows."""


@pytest.fixture(params=[("tiny-qwen3", torch.bfloat16), ("tiny-qwen2", torch.float32)], ids=str)
def model(request):
    model = build_preset(*request.param).cuda()
    with patch(model, grad_dtype=torch.float32):
        yield model


@pytest.fixture(params=["tiny-qwen3", "tiny-llama", "tiny-qwen2", "tiny-mistral", "qwen2.5-0.5b"])
def large(request):
    name = request.param
    layers = None if name.startswith("tiny") else 3
    model = build_preset(name, torch.bfloat16, num_layers=layers).cuda()
    with patch(model, grad_dtype=torch.float32):
        yield model


def test_steps_of_many_batches_are_those_of_ops_one_by_one(large):
    def steps():
        found = []
        for step in range(CAPTURED_AT + 2):
            large.zero_grad(set_to_none=True)
            for i, lengths in enumerate(BATCHES):
                loss(large, lengths, 10 * step + i).backward()
            found.append(gradients(large))
        return found

    with layers_op_by_op():
        expected = steps()
    graphs = recorded(large)
    assert same(steps(), expected)
    assert len(graphs) == 3 and graphs.replays >= 2 * len(BATCHES)


def test_grad_in_the_dtype_of_the_weights_is_continued(large):
    for parameter in large.parameters():
        parameter.grad_dtype = torch.bfloat16
    expected = alone(large, 1, 2, 3)
    captured_for(large)
    for seed in (1, 2, 3):
        loss(large, [40, 3, 17], seed).backward()
    assert same(gradients(large), expected)


def test_missing_memory_and_large_activations_are_told_and_lose_nothing(model, monkeypatch):
    expected = alone(model, 1)
    monkeypatch.setattr(layer_graphs, "MOST_MEMORY", 0.0)
    graphs = recorded(model)
    with pytest.warns(UserWarning, match="of activations"):
        for _ in range(CAPTURED_AT):
            loss(model, [40, 3, 17]).backward()
    assert len(graphs) == 0

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer_graphs.CapturedLayers, "capture", no_memory)
    graphs = recorded(model)
    with pytest.warns(UserWarning, match="no memory"):
        for _ in range(CAPTURED_AT):
            loss(model, [40, 3, 17]).backward()
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model, [40, 3, 17], 1).backward()
    assert len(graphs) == 0 and same(gradients(model), expected)


def test_graphs_make_room_for_a_larger_step(model, monkeypatch):
    expected = alone(model, 1, lengths=[300, 300])
    graphs = captured_for(model)
    monkeypatch.setattr(layer_graphs.LayersPlace, "free", lambda _: 0)
    with pytest.warns(UserWarning, match="larger steps"):
        loss(model, [300, 300], 1).backward()
    assert len(graphs) == 0 and same(gradients(model), expected)
