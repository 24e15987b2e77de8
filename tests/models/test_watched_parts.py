"""Whatever watches or replaces a part of a layer is called; no fused launch goes past it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from rl_consistency.models import modules
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.substitution import attribute
from tests.models.captured.passes import BATCHES, gradients, loss, same


def hidden(model):
    tokens = torch.tensor([list(range(3, 20))])
    return model(input_ids=tokens).logits


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "k_norm"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_watched_part_of_the_attention_is_called(part, kind):
    model, seen = build_preset("tiny-qwen3"), []
    watched = getattr(model.model.layers[0].self_attn, part)
    getattr(watched, f"register_{kind}_hook")(lambda *_: seen.append(part))
    with patch(model):
        hidden(model).sum().backward()
    assert seen == [part]


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_torch_tells_of_every_kind_of_hook_on_all_modules(kind):
    assert not modules._has_any_global_hook()
    with getattr(module, f"register_module_{kind}_hook")(lambda *_: None):
        assert modules._has_any_global_hook()
    assert not modules._has_any_global_hook()


class Doubled(nn.Module):
    """An adapter of a fine-tuning library, say: it wraps the projection and does more."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_part_of_another_class_is_called(gradients):
    model = build_preset("tiny-llama")
    x = torch.full((1, 3, 96), 0.125, requires_grad=True)
    with patch(model), torch.set_grad_enabled(gradients):
        mlp = model.model.layers[0].mlp
        down = mlp.down_proj
        expected = 2 * mlp(x)
        mlp.down_proj = Doubled(down)
        assert torch.equal(mlp(x), expected)
        mlp.down_proj = down


def test_a_projection_replaced_by_another_class_is_called_and_not_fused(monkeypatch):
    model = build_preset("tiny-llama")
    x = torch.ones(1, 3, 96) / 8
    with patch(model), torch.no_grad():
        mlp = model.model.layers[0].mlp
        gate, up = mlp.gate_proj, mlp.up_proj
        expected = mlp.down_proj(modules.glu(2 * gate(x), up(x), mlp.activation))
        mlp.gate_proj = Doubled(gate)
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(torch.Tensor, "is_cuda", True)
            assert modules._may_fuse(x, (gate, up))
            assert not modules._may_fuse(x, (mlp.gate_proj, up))
        assert torch.equal(mlp(x), expected)
        mlp.gate_proj = gate


def test_a_part_whose_parameter_was_replaced_is_refused():
    model = build_preset("tiny-qwen3")
    with patch(model):
        norm = model.model.layers[0].self_attn.q_norm
        norm.weight = nn.Parameter(norm.weight.detach().clone())
        with pytest.raises(ValueError, match="RMSNorm.weight was replaced after patch"):
            hidden(model)


def step(model):
    model.zero_grad(set_to_none=True)
    for seed, lengths in enumerate(BATCHES):
        loss(model, lengths, seed).backward()
    return gradients(model)


def kept_bytes(model):
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    # Such hooks alone would have everything kept.
    with (
        attribute(modules, "_top_saved_tensors_default_hooks", lambda _: None),
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
    ):
        loss(model, BATCHES[1])
    return sum(kept.values())


def test_a_hook_sees_what_the_down_projection_is_given_and_moves_no_bit():
    model = build_preset("tiny-qwen2", torch.bfloat16)
    seen = []
    with patch(model, grad_dtype=torch.float32):
        expected, kept = step(model), kept_bytes(model)
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda _, given, out: seen.append(given[0]))
        assert same(step(model), expected)
        width = model.config.intermediate_size
        assert len(seen) == len(BATCHES) * len(model.model.layers)
        assert all(x.shape[-1] == width for x in seen)
        rows = 80  # of 65 tokens, in bf16
        assert kept_bytes(model) - kept == len(model.model.layers) * rows * width * 2


@pytest.mark.parametrize("first", [True, False], ids=["goes", "comes"])
def test_a_hook_may_come_or_go_between_a_checkpointed_pass_and_its_repetition(first):
    model = build_preset("tiny-qwen2", torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    down = model.model.layers[0].mlp.down_proj
    with patch(model, grad_dtype=torch.float32):
        expected = step(model)
        model.zero_grad(set_to_none=True)
        for seed, lengths in enumerate(BATCHES):
            with down.register_forward_hook(lambda *_: None) if first else nullcontext():
                value = loss(model, lengths, seed)
            with nullcontext() if first else down.register_forward_hook(lambda *_: None):
                value.backward()
        assert same(gradients(model), expected)


def test_a_hook_that_the_gate_adds_is_run():
    model, seen = build_preset("tiny-llama"), []
    with patch(model):
        mlp = model.model.layers[0].mlp
        add = mlp.down_proj.register_forward_hook
        mlp.gate_proj.register_forward_hook(lambda *_: add(lambda *_: seen.append(1)) and None)
        hidden(model)
    assert seen == [1]


@pytest.mark.thorough
def test_a_hook_added_after_compilation_is_run(monkeypatch):
    # What was decided about hooks would be compiled in.
    monkeypatch.delattr(modules.CanonicalLinear, "after_glu")
    model = build_preset("tiny-llama")
    with patch(model):
        mlp = model.model.layers[0].mlp
        x = torch.randn(1, 16, model.config.hidden_size)
        compiled = torch.compile(mlp, backend="eager")
        y = compiled(x)
        mlp.down_proj.register_forward_hook(lambda _, given, out: out * 2)
        assert torch.equal(compiled(x), 2 * y)


def test_a_frozen_gate_and_up_are_not_kept():
    model = build_preset("tiny-qwen2", torch.bfloat16)
    model.requires_grad_(False)
    down = model.model.layers[-1].mlp.down_proj
    down.weight.requires_grad_()
    with patch(model, grad_dtype=torch.float32):
        kept, expected = kept_bytes(model), step(model)
        down.register_forward_hook(lambda *_: None)
        assert kept_bytes(model) == kept and same(step(model), expected)
