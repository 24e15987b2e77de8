"""Hooks of transformers that change no value are no reason to run without graphs; without gradients
nothing is checkpointed; selective checkpointing is refused."""

import functools
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from rl_consistency.models import decoder, inventory
from rl_consistency.models.modules import captures_outputs, is_unobserved
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset
from tests.models.inventory.scores import scores


def checkpointed_once(model):
    """Gradient checkpointing on and off again, as TRL does around every rollout."""
    new = hasattr(model, "activation_checkpointing_enable")  # the name in newer transformers
    way = "activation_checkpointing" if new else "gradient_checkpointing"
    getattr(model, f"{way}_enable")()
    getattr(model, f"{way}_disable")()
    return len(model.model.embed_tokens._forward_hooks)


@pytest.fixture
def patched():
    with patch(model := build_preset("tiny-qwen3")) as session:
        yield session
    del model  # the session alone does not keep it


def test_it_is_no_hook_and_no_change_however_often_it_is_put_there(patched):
    assert checkpointed_once(patched.model) == 1
    before = patched.check()
    assert checkpointed_once(patched.model) == 2 and checkpointed_once(patched.model) == 3
    assert patched.check() == before and not before.hooked
    handle = patched.model.model.embed_tokens.register_forward_hook(lambda *_: None)
    assert patched.check().hooked  # one beside it
    handle.remove()
    assert patched.check() == before


@pytest.mark.parametrize("wrap", [functools.partial, lambda hook: Mock(wraps=hook, spec=hook)])
def test_what_wraps_it_is_a_hook(patched, wrap):
    """A mock has every attribute of the function that it wraps."""
    checkpointed_once(patched.model)
    hooks = patched.model.model.embed_tokens._forward_hooks
    patched.model.model.embed_tokens.register_forward_hook(wrap(next(iter(hooks.values()))))
    assert patched.check().hooked


def test_it_counts_as_a_hook_where_nobody_knows_it(monkeypatch, patched):
    """Negative control."""
    monkeypatch.setattr(inventory, "_changes_nothing", lambda hook: False)
    checkpointed_once(patched.model)
    before = patched.check()
    checkpointed_once(patched.model)
    found = patched.check()
    assert found.hooked and found != before


@pytest.mark.parametrize("gradients", [False, True])
def test_layers_are_checkpointed_only_where_there_are_gradients(patched, gradients):
    """In training mode, in which TRL's trainer generates."""
    model, runs = patched.model.train(), []

    def counted():
        runs.append(1)
        return nullcontext(), nullcontext()

    with torch.set_grad_enabled(gradients):
        right = token_logprobs(model, [[5, 7, 11, 3]], prompt_lengths=[1]).logprobs
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": counted})
    with torch.set_grad_enabled(gradients):
        found = token_logprobs(model, [[5, 7, 11, 3]], prompt_lengths=[1]).logprobs
    assert torch.equal(found, right) and len(runs) == gradients * len(model.model.layers)


TOKENS = [[5, 7, 11, 3]]


def test_another_function_than_torch_s_runs_without_gradients_too(patched):
    """What it does cannot be known, so rollout and training both run it, and no graph holds it."""
    model = patched.model.train()
    model.gradient_checkpointing_enable()
    assert not patched.check().hooked
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda run, *args: 0.5 * run(*args)
    right = token_logprobs(model, TOKENS, prompt_lengths=[1]).logprobs
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, TOKENS, prompt_lengths=[1]).logprobs, right)
    assert patched.check().hooked and not (model.eval() and patched.check().hooked)


def test_transformers_way_around_torch_s_is_known(patched):
    patched.model.train().gradient_checkpointing_enable(offload=True)
    assert not patched.check().hooked


SOME_OPS = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.neg.default])


def gradients(model, run=lambda score: score()):
    """Those of one sequence, which `run` scores."""
    model.zero_grad()
    run(lambda: token_logprobs(model, TOKENS, prompt_lengths=[1]).logprobs).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def selective(model):
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": SOME_OPS})


def test_selective_checkpointing_is_refused(patched):
    around = functools.partial(checkpoint, use_reentrant=False, context_fn=SOME_OPS)
    with pytest.raises(ValueError, match="Leave context_fn out"):
        gradients(patched.model, around)
    selective(patched.model.train())
    with pytest.raises(ValueError, match="Leave context_fn out"):
        gradients(patched.model)


def test_selective_checkpointing_would_give_other_gradients(patched, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(decoder, "refuse_selective_checkpointing", lambda: None)
    right = gradients(patched.model.train())
    selective(patched.model)
    found = gradients(patched.model)
    assert not all(map(torch.equal, right, found))


PRESETS = ["tiny-qwen3", "tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"]
IDS = torch.tensor([[1, 2, 3]])


def asked_for_outputs(model):
    """A stock forward that puts the hooks there."""
    model(IDS, output_hidden_states=True)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert hooks and all(map(captures_outputs, hooks))


def unobserved(model):
    return [is_unobserved(module) for module in model.modules()]


@pytest.mark.parametrize("preset", PRESETS)
def test_hooks_that_collect_outputs_do_not_count(preset):
    model = build_preset(preset)
    with patch(model) as session:
        right, before, plain = scores(model), session.check(), unobserved(model)
        with session.stock():
            asked_for_outputs(model)
        assert torch.equal(scores(model), right)
        assert not session.check().hooked and not before.hooked
        assert unobserved(model) == plain and any(plain)
    with patch(model):
        assert torch.equal(scores(model), right)


def test_they_still_collect():
    model = build_preset("tiny-qwen3")
    right = model(IDS, output_hidden_states=True).hidden_states
    with patch(model) as session, session.stock():
        found = model(IDS, output_hidden_states=True).hidden_states
    assert len(found) == len(right) and all(map(torch.equal, found, right))


def test_a_hook_of_its_name_from_elsewhere_is_refused_at_a_router():
    def output_capturing_hook(module, args, output):
        return output

    model = build_preset("tiny-olmoe")
    model.model.layers[0].mlp.gate.register_forward_hook(output_capturing_hook)
    with pytest.raises(ValueError, match="gate.* has a hook"):
        patch(model)


def test_where_nobody_knows_them_they_count(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(inventory, "captures_outputs", lambda hook: False)
    model = build_preset("tiny-olmoe")
    asked_for_outputs(model)
    with pytest.raises(ValueError, match="gate.* has a hook"):
        patch(model)
