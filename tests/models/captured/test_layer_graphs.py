"""Training through captured layers: the bytes of the ops run one by one, whatever comes between."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

from rl_consistency.models.captured.captured_layers import CapturedLayers
from rl_consistency.models.captured.layer_graphs import CAPTURED_AT, MOST_MOVES, layers_op_by_op
from rl_consistency.models.patch import patch
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.presets import build_preset
from tests.models.captured.recorded_graphs import recorded

BATCHES = ([40, 3, 17], [64], [1, 1, 50], [16, 15, 20, 2])
"""Lengths of scored tokens; 96, 80, 96 and 96 rows, which one captured call of 96 has room for."""


def tokens(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 60, (n + 1,), generator=generator).tolist() for n in lengths]


def loss(model, lengths, seed=0):
    sequences = tokens(lengths, seed)
    scored = token_logprobs(model, sequences, prompt_lengths=[1] * len(sequences))
    weights = torch.linspace(-1, 2, len(scored.logprobs)).to(scored.logprobs.device)
    return (scored.logprobs * weights).sum() + 0.1 * scored.entropy.sum()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def steps(model, *, micro_batches=2):
    """Losses and gradients of several steps of several micro-batches."""
    found, seeds = [], count()
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        for lengths in BATCHES[:micro_batches]:
            value = loss(model, lengths, next(seeds))
            value.backward()
            found.append(value.detach())
        found.append(gradients(model))
    return found


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return same_bytes(a, b)


@pytest.fixture(params=[("tiny-qwen3", torch.bfloat16), ("tiny-qwen2", torch.float32)], ids=str)
def model(request):
    model = build_preset(*request.param)
    with patch(model, grad_dtype=torch.float32):
        yield model


@pytest.fixture
def graphs(model):
    return recorded(model)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_replayed_steps_are_those_of_ops_one_by_one(model, micro_batches):
    expected = steps(model, micro_batches=micro_batches)
    graphs = recorded(model)
    assert same(steps(model, micro_batches=micro_batches), expected)
    assert graphs.replays == max(3 * micro_batches - CAPTURED_AT + 1, 0)
    assert same(steps(model, micro_batches=micro_batches), expected)


def captured_for(model, lengths=BATCHES[0]):
    """Graphs that have captured the rows of these lengths; no gradient is left."""
    graphs = recorded(model)
    for _ in range(CAPTURED_AT):
        loss(model, lengths).backward()
    assert len(graphs) == graphs.replays == 1
    model.zero_grad(set_to_none=True)
    graphs.replays = 0
    return graphs


def alone(model, *seeds, lengths=BATCHES[0]):
    """Gradients of these micro-batches, op by op."""
    model.zero_grad(set_to_none=True)
    with layers_op_by_op():
        for seed in seeds:
            loss(model, lengths, seed).backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found


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
    graphs = captured_for(model)
    seen = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    loss(model, BATCHES[0], 1).backward()
    assert seen == [1] and graphs.replays == 0
    handle.remove()


def test_scoring_without_gradients_takes_graphs_that_are_there(model):
    with torch.no_grad(), layers_op_by_op():
        expected = loss(model, BATCHES[3], 5)
    graphs = captured_for(model)
    with torch.no_grad():
        assert same(loss(model, BATCHES[3], 5), expected)
        assert same(loss(model, [200], 5), loss(model, [200], 5))
    assert len(graphs) == 1 and graphs._latest is None
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
    model = build_preset("tiny-qwen3")
    with patch(model, grad_dtype=torch.float32):
        captured_for(model)
        gone = weakref.ref(model.model)
        gc.disable()
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()


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
    captured_for(model)
    loss(model, BATCHES[0], 1).backward()
    a, b = (model.model.layers[i].mlp.up_proj.weight for i in (0, 1))
    if what == "exchanged":
        a.grad, b.grad = b.grad, a.grad
    elif what == "resized":
        a.grad.untyped_storage().resize_(0)
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
