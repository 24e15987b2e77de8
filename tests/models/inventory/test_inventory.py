"""What the patched forward would pass over is refused by name, before the patch and after it."""

import copy
import functools
from operator import methodcaller

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3 import modeling_qwen3

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset
from tests.models.inventory.refusals import (
    at,
    hooked,
    in_config,
    refused_live,
    refused_untouched,
    replaced,
    set_on,
)
from tests.models.inventory.scores import halved, scores


def first_mlp(model):
    return model.model.layers[0].mlp


def biased_head(model, undo):
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight = model.lm_head.weight
    nn.init.normal_(head.bias)
    model.lm_head = head


def relu(model, undo):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def hooked_everywhere(model, undo):
    undo.enter_context(register_module_forward_hook(lambda *_: None))


def own_attention(model, undo):
    def twice(module, query, key, value, mask, **options):
        return sdpa_attention_forward(module, query * 2, key, value, mask, **options)

    AttentionInterface.register("twice", twice)
    model.config._attn_implementation = "twice"


def adapter_named_alike(model, undo):
    linear = type("Linear", (nn.Module,), {"__module__": "peft.layer"})()
    linear.base_layer = model.model.layers[0].self_attn.q_proj
    model.model.layers[0].self_attn.q_proj = linear


class Sharded(torch.Tensor):
    """A tensor that has its own arithmetic."""


def tensor_subclass(model, undo):
    linear = first_mlp(model).up_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Sharded))


class OtherMLP(modeling_qwen3.Qwen3MLP):
    def forward(self, x):
        return super().forward(x) * 0.5


def subclassed(model, undo):
    model.model.layers[1].mlp = OtherMLP(model.config)


def instance_forward(model, undo):
    mlp = model.model.layers[1].mlp
    mlp.forward = functools.partial(modeling_qwen3.Qwen3MLP.forward, mlp)


def other_rope(model, undo):
    model.config.rope_parameters["rope_theta"] = 500.0


def two_configs(model, undo):
    model.model.config = copy.deepcopy(model.config)


def shadowed(model, undo):
    mlp = model.model.layers[1].mlp
    vars(mlp)["up_proj"] = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features)


def wrapped(model, undo):
    model.model.layers[0] = nn.Sequential(model.model.layers[0])


def wrapped_by_a_compiler(model, undo):
    model.model.layers[0].mlp = torch.compile(first_mlp(model))


def renamed(model, undo):
    parts = model.model.layers[0].self_attn._modules
    parts["query"] = parts.pop("q_proj")


@functools.wraps(modeling_qwen3.Qwen3MLP.forward)
def half_mlp(self, x):
    return half_mlp.__wrapped__(self, x) * 0.5


def half_linear(self, x):
    return nn.functional.linear(x, self.weight, self.bias) * 0.5


half_mlps = replaced(modeling_qwen3.Qwen3MLP, "forward", half_mlp)
half_linears = replaced(nn.Linear, "forward", half_linear)
other_mlps = replaced(modeling_qwen3, "Qwen3MLP", OtherMLP)
half_rotaries = replaced(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))


def other_frequencies(rotary):
    rotary.inv_freq = rotary.inv_freq * 0.25


def slower(rotary):
    rotary.inv_freq.mul_(0.25)


def with_buffer(mlp):
    mlp.register_buffer("mask", torch.ones(1))


ATTENTION, MLP, ROTARY = "model.layers.1.self_attn", "model.layers.1.mlp", "model.rotary_emb"
UP, FIRST = f"{MLP}.up_proj", "model.layers.0.self_attn"
drop_first, drop_norm = methodcaller("__delitem__", 0), methodcaller("__delattr__", "norm")
prune_some = functools.partial(prune.random_unstructured, name="weight", amount=0.3)

REFUSED = {
    "bias on the head": (biased_head, r"lm_head \(Linear\) has parameters .*'bias'"),
    "hook on the head": (hooked("lm_head", hook=halved), r"lm_head \(Linear\) has a hook"),
    "hook before the head": (hooked("lm_head", "forward_pre"), r"lm_head \(Linear\) has a hook"),
    "hook behind the head": (hooked("lm_head", "full_backward"), r"lm_head .* has a hook"),
    "hook on the decoder": (hooked("model", hook=halved), r"model \(Qwen3Model\) has a hook"),
    "hook on the root": (hooked(""), r"root \(Qwen3ForCausalLM\) has a hook"),
    "hook on rotary": (hooked("model.rotary_emb"), r"model.rotary_emb .* has a hook"),
    "hook on act_fn": (hooked(f"{MLP}.act_fn", hook=halved), r"act_fn .* has a hook"),
    "hook on all modules": (hooked_everywhere, "a hook on all modules"),
    "another act_fn": (relu, r"mlp.act_fn \(ReLU\) .*makes a SiLUActivation here"),
    "another MLP.forward": (half_mlps, "Qwen3MLP was replaced by a class with another forward"),
    "another Linear.forward": (
        half_linears,
        r"Linear was replaced by a class with another forward",
    ),
    "another MLP class": (
        other_mlps,
        "Qwen3MLP was replaced by .*OtherMLP; .*kernel library",
    ),
    "another rotary function": (
        half_rotaries,
        "apply_rotary_pos_emb was replaced by a function",
    ),
    "subclass of the MLP": (subclassed, r"mlp \(OtherMLP\) has no canonical order"),
    "forward on the instance": (instance_forward, r"mlp \(Qwen3MLP\) had its forward replaced"),
    "frequencies": (at(ROTARY, slower), r"rotary_emb .* has another inv_freq than"),
    "frequencies replaced": (
        at(ROTARY, other_frequencies),
        "rotary_emb .* has another inv_freq than",
    ),
    "scaling": (set_on(ATTENTION, scaling=0.5), r"self_attn .* has scaling=0.5, and the config"),
    "not causal": (set_on(ATTENTION, is_causal=False), "has is_causal=False"),
    "dropout": (set_on(ATTENTION, attention_dropout=0.5), "has attention_dropout=0.5"),
    "eps": (set_on("model.norm", variance_epsilon=0.1), r"model.norm .* has variance_epsilon=0.1"),
    "groups": (set_on(ATTENTION, num_key_value_groups=1), "has num_key_value_groups=1"),
    "window": (set_on(ATTENTION, sliding_window=4), "has sliding_window=4"),
    "scaled gradient": (set_on("model.embed_tokens", scale_grad_by_freq=True), "by_freq=True, and"),
    "renormalized embedding": (set_on("model.embed_tokens", max_norm=1.0), "has max_norm=1.0"),
    "pruned": (at(UP, prune_some), "up_proj .* has its own weight, which hides"),
    "weight norm": (at(UP, parametrizations.weight_norm), "up_proj .* the config makes a Linear"),
    "old weight norm": (at(UP, nn.utils.weight_norm), "up_proj .* has its own weight, which hides"),
    "an adapter": (adapter_named_alike, r"q_proj \(peft.layer.Linear\) has no canonical order"),
    "own attention": (own_attention, "attn implementation 'twice' is a function of"),
    "compiled part": (at(MLP, nn.Module.compile), r"mlp \(Qwen3MLP\) is compiled"),
    "wrapped part": (wrapped_by_a_compiler, r"mlp \(OptimizedModule\) has no canonical order"),
    "a layer less": (at("model.layers", drop_first), "has 1 layers, .*num_hidden_layers is 2"),
    "no norm": (set_on(FIRST, q_norm=None), r"q_norm \(Qwen3RMSNorm\) is missing"),
    "more layers in the config": (in_config(num_hidden_layers=3), "2 layer_types for num_hidden"),
    "hidden by an attribute": (shadowed, r"up_proj \(Linear\) is hidden by an attribute"),
    "around a layer": (wrapped, r"layers.0 \(Sequential\) has no canonical order"),
    "another name": (renamed, r"self_attn.q_proj \(Linear\) is missing"),
    "no last norm": (at("model", drop_norm), r"model.norm \(Qwen3RMSNorm\) is missing"),
    "rope in the config": (other_rope, "rotary_emb .* has another inv_freq than the config makes"),
    "eps in the config": (in_config(rms_norm_eps=0.1), "has variance_epsilon=1e-06, and"),
    "activation in the config": (in_config(hidden_act="gelu"), "makes a GELUActivation|has 'gelu'"),
    "dropout in the config": (in_config(attention_dropout=0.5), "active dropout"),
    "one dtype": (lambda model, undo: model.model.norm.bfloat16(), "model.norm.weight is torch.bf"),
    "one config": (two_configs, r"model \(Qwen3Model\) has a config that is not the model's"),
    "a tensor subclass": (tensor_subclass, "up_proj.weight is a Sharded"),
    "an extra buffer": (at(MLP, with_buffer), "mlp .* has buffers {'mask'"),
}

BEFORE_ONLY = {"bias on the head", "weight norm", "another MLP class"}
"""Changes that a live patch meets in other words, or that do not reach a model once built."""


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_the_forward_would_pass_over_is_refused_untouched(change, message, model, undo):
    refused_untouched(change, message, model, undo)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - BEFORE_ONLY))
def test_a_live_patch_refuses_the_same_before_a_number_is_computed(name, model, undo):
    refused_live(*REFUSED[name], model, undo)


def test_a_parametrization_of_a_patched_part_is_refused_and_stands_in_restores_way(model):
    session = patch(model)
    up = model.model.layers[0].mlp.up_proj
    parametrizations.weight_norm(up)
    with pytest.raises(UnsupportedModelError, match="up_proj .* has no canonical order"):
        scores(model)
    with pytest.raises(ValueError, match="up_proj is a Parametrized.*Nothing was restored"):
        session.restore()
    assert session._taken and type(model.model.norm) is not modeling_qwen3.Qwen3RMSNorm
    nn.utils.parametrize.remove_parametrizations(up, "weight")
    session.restore()
    assert type(model.model.norm) is modeling_qwen3.Qwen3RMSNorm


def test_a_window_edited_in_the_config_of_a_live_patch_is_refused():
    """Mistral reads it from the config at every call."""
    model = build_preset("tiny-mistral")
    with patch(model):
        before = scores(model)
        model.config.sliding_window += 1
        with pytest.raises(UnsupportedModelError, match="patched with window="):
            scores(model)
        model.config.sliding_window -= 1
        layer = model.model.layers[1].self_attn
        layer.config = copy.deepcopy(model.config)
        assert torch.equal(scores(model), before)
        layer.config.sliding_window += 1
        with pytest.raises(UnsupportedModelError, match="self_attn .* in a config of its own"):
            scores(model)
