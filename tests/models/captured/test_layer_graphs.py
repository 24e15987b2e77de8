"""Training through captured layers: the bytes of the ops run one by one, whatever comes between."""

import gc
import weakref

import pytest
import torch

from rl_consistency.models.layer_graphs import CAPTURED_AT, layers_op_by_op
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset
from tests.models.captured.passes import (
    BATCHES,
    alone,
    captured_for,
    gradients,
    loss,
    same,
    steps,
    tokens,
)
from tests.models.captured.recorded_graphs import recorded


@pytest.mark.parametrize("micro_batches", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
def test_replayed_steps_are_those_of_ops_one_by_one(model, micro_batches):
    expected = steps(model, micro_batches=micro_batches)
    graphs = recorded(model)
    assert same(steps(model, micro_batches=micro_batches), expected)
    assert graphs.replays == max(3 * micro_batches - CAPTURED_AT + 1, 0)
    assert same(steps(model, micro_batches=micro_batches), expected)


def test_a_gradient_that_somebody_keeps_is_not_written_to(model):
    expected = [alone(model, 1), alone(model, 2), alone(model, 3)]
    captured_for(model)
    kept = []
    for seed in (1, 2, 3):
        model.zero_grad(set_to_none=True)
        loss(model, BATCHES[0], seed).backward()
        kept.append({name: p.grad for name, p in model.named_parameters()})
    assert same(kept, expected)


@pytest.mark.parametrize("made", ["zeros", "views of a bucket", "of another pass"])
def test_gradients_that_are_there_are_continued_in_their_own_memory(model, made):
    expected = alone(model, 1, 2)
    graphs = captured_for(model)
    if made == "of another pass":
        with layers_op_by_op():
            loss(model, BATCHES[0], 1).backward()
    else:
        parameters = list(model.parameters())
        bucket = torch.zeros(sum(p.numel() for p in parameters), device=model.device)
        parts = bucket.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts):
            p.grad = part.view_as(p) if made != "zeros" else torch.zeros_like(p, dtype=part.dtype)
        loss(model, BATCHES[0], 1).backward()
    before = [p.grad.data_ptr() for p in model.parameters()]
    loss(model, BATCHES[0], 2).backward()
    assert same(gradients(model), expected) and graphs.replays == (1 if made[0] == "o" else 2)
    assert [p.grad.data_ptr() for p in model.parameters()] == before


def test_what_is_done_to_a_gradient_between_two_passes_stays(model):
    def halved_between():
        loss(model, BATCHES[0], 1).backward()
        for p in model.parameters():
            p.grad *= 0.5
        loss(model, BATCHES[0], 2).backward()
        found = gradients(model)
        model.zero_grad(set_to_none=False)
        loss(model, BATCHES[0], 3).backward()
        found = [found, gradients(model)]
        model.zero_grad(set_to_none=True)
        return found

    with layers_op_by_op():
        expected = halved_between()
    captured_for(model)
    assert same(halved_between(), expected)


def test_a_forward_pass_before_another_has_gone_backward_runs_op_by_op(model):
    expected = alone(model, 1, 2)
    graphs = captured_for(model)
    first, second = loss(model, BATCHES[0], 1), loss(model, BATCHES[0], 2)
    assert graphs.replays == 1
    first.backward()
    second.backward()
    assert same(gradients(model), expected)


def test_a_forward_pass_that_is_dropped_is_not_waited_for(model):
    graphs = captured_for(model)
    for seed in range(3):
        loss(model, BATCHES[0], seed)
    assert graphs.replays == 3


def test_a_retained_pass_computes_its_activations_again(model):
    embedding = model.model.embed_tokens.weight
    first = model.model.layers[0].self_attn.q_proj.weight

    def retained():
        value = loss(model, BATCHES[0], 1)
        found = [torch.autograd.grad(value, [first, embedding], retain_graph=True)]
        loss(model, BATCHES[0], 2).backward()
        found.append(torch.autograd.grad(value, [first], retain_graph=True))
        found = [x.clone() for each in found for x in each]
        loss(model, BATCHES[0], 3).backward()
        return [*found, gradients(model)]

    model.zero_grad(set_to_none=True)
    with layers_op_by_op():
        expected = retained()
    captured_for(model)
    assert same(retained(), expected)


def test_a_second_pass_of_a_freed_graph_is_refused(model):
    captured_for(model)
    value = loss(model, BATCHES[0], 1)
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


def test_gradients_of_some_inputs_leave_grad_alone(model):
    expected = alone(model, 1)
    parameters = dict(model.named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    of_up = alone(model, 2)[name]
    captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    value = loss(model, BATCHES[0], 2)
    assert same(list(torch.autograd.grad(value, [parameters[name]])), [of_up])
    assert same(gradients(model), expected)
    expected = alone(model, 1, 3)
    loss(model, BATCHES[0], 1).backward()
    loss(model, BATCHES[0], 3).backward()
    assert same(gradients(model), expected)


def test_hooks_of_parameters_see_what_they_see_op_by_op(model):
    weight = model.model.layers[0].mlp.down_proj.weight
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    expected = alone(model, 1, 2)
    by_op, seen[:] = list(seen), []
    captured_for(model)
    seen.clear()
    loss(model, BATCHES[0], 1).backward()
    loss(model, BATCHES[0], 2).backward()
    assert same(gradients(model), expected) and same(seen, by_op) and len(seen) == 4


def test_frozen_parameters_have_no_gradient_and_a_change_is_followed(model):
    up = model.model.layers[0].mlp.up_proj.weight
    model.model.embed_tokens.weight.requires_grad_(False)
    up.requires_grad_(False)
    expected = alone(model, 1)
    graphs = captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    assert graphs.replays == 1 and up.grad is None and same(gradients(model), expected)
    model.zero_grad(set_to_none=True)
    up.requires_grad_(True)
    loss(model, BATCHES[0], 1).backward()
    assert graphs.replays == 1 and len(graphs) == 0 and up.grad is not None


def test_changed_weights_are_read_and_moved_ones_are_captured_again(model):
    graphs = captured_for(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)
    loss(model, BATCHES[0], 1).backward()
    found = gradients(model)
    assert graphs.replays == 1 and same(found, alone(model, 1))
    moved = model.model.layers[0].mlp.up_proj.weight
    moved.data = moved.data * 2
    loss(model, BATCHES[0], 1).backward()
    found = gradients(model)
    assert graphs.replays == 1 and same(found, alone(model, 1))


def test_a_hook_on_a_module_is_run(model):
    graphs, seen = captured_for(model), []
    with model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1)):
        loss(model, BATCHES[0], 1).backward()
    assert seen == [1] and graphs.replays == 0


def test_scoring_without_gradients_takes_graphs_that_are_there(model):
    with torch.no_grad(), layers_op_by_op():
        expected = loss(model, BATCHES[3], 5)
    graphs = captured_for(model)
    with torch.no_grad():
        assert same(loss(model, BATCHES[3], 5), expected)
        assert same(loss(model, [200], 5), loss(model, [200], 5))
    assert len(graphs) == 1 and not graphs._is_busy()
    waiting = loss(model, BATCHES[0], 1)
    with torch.no_grad():
        assert same(loss(model, BATCHES[3], 5), expected)  # not over the activations that wait
    waiting.backward()
    found = gradients(model)
    assert same(found, alone(model, 1))


def test_hidden_states_are_the_callers(model):
    captured_for(model)
    batches = [torch.tensor(tokens([90], seed)).to(model.device) for seed in (1, 2)]
    first = model.model(input_ids=batches[0]).last_hidden_state
    held = first.detach().clone()
    first.sum().backward()
    model.model(input_ids=batches[1])
    assert same(first.detach(), held)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_written_between_the_two_passes_are_refused(model, frozen):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(not frozen)
    captured_for(model)
    value = loss(model, BATCHES[0], 1)
    with torch.no_grad():
        weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_graphs_do_not_keep_their_model():
    with patch(model := build_preset("tiny-qwen3"), grad_dtype=torch.float32):
        captured_for(model)
        gone = weakref.ref(model.model)
        gc.disable()
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()
