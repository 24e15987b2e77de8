"""Ops of a decoder layer as one function of autograd: when they are, and that no byte tells."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from rl_consistency.models import modules
from rl_consistency.models.patch import patch
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.digest import first_difference
from rl_consistency.verify.presets import PRESETS, build_preset
from rl_consistency.verify.probe import probe_tokens


def step(model):
    """Logprobs and gradients of two micro-batches."""
    model.zero_grad(set_to_none=True)
    found = []
    for lengths in ((9, 33), (21, 16)):
        tokens = probe_tokens(lengths, model.config.vocab_size)
        scored = token_logprobs(model, tokens, prompt_lengths=[1, 1]).logprobs
        scored.sum().backward()
        found.append(scored.detach())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return gradients | {"logprobs": torch.cat(found)}


@pytest.fixture
def joined(monkeypatch):
    """How often a layer's ops ran as one function."""
    calls = []

    def counted(function):
        def call(*operands):
            calls.append(function.__name__)
            return function(*operands)

        return call

    for function in (modules.attention_inputs, modules.gated_mlp):
        monkeypatch.setattr(modules, function.__name__, counted(function))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_training_step_has_the_bytes_of_the_ops_apart(preset, dtype, joined, monkeypatch):
    model = build_preset(preset, dtype)
    with patch(model):
        found = step(model)
        layers = model.config.num_hidden_layers
        assert sorted(joined) == ["attention_inputs"] * 2 * layers + ["gated_mlp"] * 2 * layers
        monkeypatch.setattr(modules, "_may_join", lambda *modules: False)
        expected = step(model)
    assert len(joined) == 4 * layers
    assert first_difference(found, expected) is None


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm"])
def test_gradients_of_another_use_of_x_are_added_as_for_the_ops_apart(norm, joined, monkeypatch):
    model = build_preset("tiny-qwen3", torch.bfloat16)
    seen = []
    watched = getattr(model.model.layers[1], norm)
    watched.register_forward_hook(lambda module, operands, y: seen.append(y))
    tokens = probe_tokens((37, 21), model.config.vocab_size)

    def gradients():
        model.zero_grad(set_to_none=True)
        seen.clear()
        scored = token_logprobs(model, tokens, prompt_lengths=[1, 1]).logprobs
        (scored.sum() + 0.01 * seen[0].float().square().sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    with patch(model):
        found = gradients()
        assert len(joined) == 2 * model.config.num_hidden_layers
        monkeypatch.setattr(modules, "_may_join", lambda *operands: False)
        assert first_difference(found, gradients()) is None


@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.up_proj"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_may_be_redone_joined_where_it_ran_apart(part, reentrant, joined):
    model = build_preset("tiny-qwen3", torch.bfloat16)
    with patch(model):
        expected = step(model)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad(set_to_none=True)
        found = []
        for lengths in ((9, 33), (21, 16)):
            hook = model.model.layers[0].get_submodule(part).register_forward_hook(lambda *_: None)
            tokens = probe_tokens(lengths, model.config.vocab_size)
            found.append(token_logprobs(model, tokens, prompt_lengths=[1, 1]).logprobs)
            hook.remove()
            found[-1].sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
    found = gradients | {"logprobs": torch.cat(found).detach()}
    assert first_difference(found, expected) is None


def test_below_the_first_trained_weight_ops_stay_apart(joined):
    model = build_preset("tiny-qwen3")
    model.model.embed_tokens.requires_grad_(False)
    with patch(model):
        hidden(model).sum().backward()
    layers = model.config.num_hidden_layers
    # The norm before the first attention is trained, and so are all its rows.
    assert joined.count("attention_inputs") == layers and joined.count("gated_mlp") == layers
    joined.clear()
    model.model.layers[0].input_layernorm.requires_grad_(False)
    with patch(model):
        hidden(model).sum().backward()
    assert joined.count("attention_inputs") == layers - 1 and joined.count("gated_mlp") == layers


def hidden(model):
    tokens = torch.tensor([list(range(3, 20))])
    return model(input_ids=tokens).logits


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "k_norm"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_watched_part_of_the_attention_is_called(part, kind, joined):
    model = build_preset("tiny-qwen3")
    seen = []
    watched = getattr(model.model.layers[0].self_attn, part)
    getattr(watched, f"register_{kind}_hook")(lambda *_: seen.append(part))
    with patch(model):
        hidden(model).sum().backward()
    assert seen == [part]
    layers = model.config.num_hidden_layers
    assert joined.count("attention_inputs") == layers - 1 and joined.count("gated_mlp") == layers


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_watched_part_of_the_mlp_is_called(part, joined):
    model = build_preset("tiny-llama")
    seen = []
    watched = getattr(model.model.layers[0].mlp, part)
    watched.register_forward_hook(lambda *_: seen.append(part))
    with patch(model):
        hidden(model)
    layers = model.config.num_hidden_layers
    assert seen == [part] and joined.count("gated_mlp") == layers - 1


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_torch_tells_of_every_kind_of_hook_on_all_modules(kind):
    assert not modules._has_any_global_hook()
    handle = getattr(module, f"register_module_{kind}_hook")(lambda *_: None)
    try:
        assert modules._has_any_global_hook()
    finally:
        handle.remove()
    assert not modules._has_any_global_hook()


@pytest.mark.parametrize(
    "around", [torch.no_grad, lambda: strict(except_={"rms_norm"}), lambda: strict(False)]
)
def test_without_gradients_or_on_a_stock_path_ops_stay_apart(around, joined):
    model = build_preset("tiny-qwen3")
    with patch(model), around():
        hidden(model)
    assert not joined


def test_a_compiler_is_shown_the_ops(joined, monkeypatch):
    model = build_preset("tiny-llama")
    with patch(model):
        x, up = torch.ones(1, 3, 96, requires_grad=True), model.model.layers[0].mlp.up_proj
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not modules._may_join(x, up)
        monkeypatch.undo()
        assert modules._may_join(x, up)


class Doubled(nn.Module):
    """An adapter of a fine-tuning library, say: it wraps the projection and does more."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_part_of_another_class_is_called(gradients, joined):
    model = build_preset("tiny-llama")
    x = torch.full((1, 3, 96), 0.125, requires_grad=True)
    with patch(model), nullcontext() if gradients else torch.no_grad():
        mlp = model.model.layers[0].mlp
        down = mlp.down_proj
        expected = 2 * mlp(x)
        joined.clear()
        mlp.down_proj = Doubled(down)
        assert torch.equal(mlp(x), expected) and not joined
        mlp.down_proj = down


def test_a_part_whose_parameter_was_replaced_is_refused(joined):
    model = build_preset("tiny-qwen3")
    with patch(model):
        norm = model.model.layers[0].self_attn.q_norm
        norm.weight = nn.Parameter(norm.weight.detach().clone())
        with pytest.raises(ValueError, match="RMSNorm.weight was replaced after patch"):
            hidden(model)
    assert not joined
