"""What Python looks up elsewhere than in a module's own attributes: in classes, in the config's
class, in torch's containers; hooks under names of libraries; values that are no plain ones."""

import sys
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules.container import ModuleList
from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

from tests.models.inventory.refusals import (
    added,
    at,
    hooked,
    in_config,
    refused_live,
    refused_untouched,
    replaced,
    set_on,
)
from tests.models.inventory.scores import halved


def computed(value, keeps=lambda self, given: None):
    return property(lambda self: value, keeps)


def reordered(layers):
    items = [*layers._modules.items()]
    layers._modules.clear()
    layers._modules.update(items[::-1])


def swapped(attention):
    """The places are as before; the names are not."""
    parts = attention._modules
    names, modules = [*parts], [*parts.values()]
    parts.clear()
    parts.update(zip([names[1], names[0], *names[2:]], modules, strict=True))


class Cut(ModuleList):
    def __getitem__(self, index):
        return super().__getitem__(slice(0, 1) if isinstance(index, slice) else index)


def cut(model, undo):
    model.model.layers.__class__ = Cut


def cut_for_all(model, undo):
    """The model that the config makes has it too."""
    undo.callback(setattr, nn, "ModuleList", ModuleList)
    nn.ModuleList = Cut
    cut(model, undo)


class Backwards(dict):
    def values(self):
        return [*super().values()][::-1]


class Doubled(dict):
    def __getitem__(self, key):
        return 2 * super().__getitem__(key)


class Silent(OrderedDict):
    def values(self):
        return []


def kept_in(kind, name):
    def change(module):
        vars(module)[name] = kind(vars(module)[name])

    return change


def unseen_hook(head):
    head.register_forward_hook(halved)
    kept_in(Silent, "_forward_hooks")(head)


class Equal(float):
    """A number that says it is any other."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = float.__hash__


def looked_up(self, name, was=nn.Module.__getattr__):
    return was(self, name)


def is_causal(self, name):
    if name == "is_causal":
        return True
    raise AttributeError(name)


class Layers(list):
    def __iter__(self):
        return iter(["full_attention"] * len(self))


def subclassed_config(model, undo):
    cls = type("Other", (type(model.config),), {"rms_norm_eps": computed(0.5)})
    model.config.__class__ = cls


def mapped(model, undo):
    names = type(model.config).attribute_map
    undo.callback(names.pop, "num_hidden_layers")
    names["num_hidden_layers"] = "num_attention_heads"


def of_a_made_up_module(name):
    """A hook as a vendored copy of a library has it."""
    module = types.ModuleType(name)
    exec("def half(module, given, output):\n    return output * 0.5", vars(module))
    return module.half


def in_a_library(path):
    """A hook in the namespace of a real module."""

    def change(model, undo):
        space = vars(sys.modules[path])
        exec("def half(module, given, output):\n    return output * 0.5", space)
        hook = space.pop("half")
        hook.__qualname__ = "install_output_capuring_hook.<locals>.output_capturing_hook"
        undo.enter_context(model.lm_head.register_forward_hook(hook))

    return change


def around_a_library(model, undo):
    """A library's own wrapper, around a hook of somebody else."""
    undo.enter_context(model.lm_head.register_forward_hook(torch.compiler.disable(halved)))


def negated(model, undo):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = torch._neg_view(weight.detach())


def sparse(model, undo):
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse())


FIRST, ATTENTION = "model.layers.0.self_attn", "model.layers.1.self_attn"

REFUSED = {
    "layers in another order": (at("model.layers", reordered), "layers in the order 1, 0"),
    "layers from the last": (
        at("model.layers", kept_in(Backwards, "_modules")),
        "has a .*Backwards as its _modules, and no dict",
    ),
    "doubled buffers": (
        at("model.rotary_emb", kept_in(Doubled, "_buffers")),
        "has a .*Doubled as its _buffers",
    ),
    "doubled weights": (
        at("lm_head", kept_in(Doubled, "_parameters")),
        "has a .*Doubled as its _parameters",
    ),
    "a hook that is not listed": (at("lm_head", unseen_hook), "has a .*Silent as its _forward_ho"),
    "swapped names": (at(FIRST, swapped), "k_proj .* has|q_proj .* has"),
    "a list cut short": (cut, r"layers \(Cut\) has no canonical order"),
    "another ModuleList": (cut_for_all, r"layers \(Cut\) has (no canonical|a class whose)"),
    "ModuleList.__getitem__": (
        replaced(ModuleList, "__getitem__", Cut.__getitem__),
        "ModuleList was replaced by a class with another __getitem__",
    ),
    "ModuleList.__iter__": (
        replaced(ModuleList, "__iter__", lambda self: iter(self._modules.values())),
        "ModuleList was replaced by a class with another __iter__",
    ),
    "ModuleList.__getattribute__": (
        added(
            ModuleList, "__getattribute__", lambda self, name: object.__getattribute__(self, name)
        ),
        "ModuleList was replaced by a class with another __getattribute__",
    ),
    "Module.__getattr__": (
        replaced(nn.Module, "__getattr__", looked_up),
        "Module was replaced by a class with another __getattr__",
    ),
    "class with a part": (
        added(Qwen3MLP, "act_fn", computed(torch.relu)),
        "whose own act_fn hides",
    ),
    "class with a weight": (added(Qwen3RMSNorm, "weight", 2.0), "whose own weight hides"),
    "class with a number": (added(Qwen3Attention, "scaling", computed(0.5)), "own scaling hides"),
    "a setting computed": (
        added(Qwen3Config, "num_hidden_layers", computed(1)),
        "config whose num_hidden_layers is computed",
    ),
    "a setting more": (
        added(Qwen3Config, "is_causal", computed(True)),
        "config whose is_causal is computed",
    ),
    "settings looked up": (
        added(Qwen3Config, "__getattr__", is_causal),
        "config whose __getattr__ is computed",
    ),
    "a property of transformers": (
        replaced(PreTrainedConfig, "_attn_implementation", computed("sdpa")),
        "config whose _attn_implementation is computed",
    ),
    "a config of another class": (subclassed_config, "config whose rms_norm_eps is computed"),
    "settings under other names": (mapped, "layer_types for num_hidden_layers=4"),
    "a list of its own": (
        lambda model, undo: vars(model.config).update(layer_types=Layers(model.config.layer_types)),
        r"has a .*Layers as config.layer_types",
    ),
    "a number of its own": (set_on(ATTENTION, scaling=Equal(0.25)), "has scaling=<class .*Equal"),
    "hidden states": (in_config(output_hidden_states=True), "output_hidden_states=True, which the"),
    "one hidden state": (in_config(output_hidden_states=[0]), r"output_hidden_states=\[0\], which"),
    "attentions": (in_config(_output_attentions=True), "output_attentions=True, which the"),
    "no such row": (set_on("model.embed_tokens", padding_idx=10**6), "has padding_idx=1000000, w"),
    "a sparse gradient": (set_on("model.embed_tokens", sparse=True), "has sparse=True, and the"),
    "another norm": (set_on("model.embed_tokens", norm_type=1.0), "has norm_type=1.0, and the"),
    "negated": (negated, "up_proj.weight is a lazily negated view"),
    "sparse": (sparse, "up_proj.weight is sparse"),
    "hook of a made-up module": (
        hooked("lm_head", hook=of_a_made_up_module("deepspeed.mine")),
        r"lm_head \(Linear\) has a hook",
    ),
    "hook of a library's name": (
        hooked("lm_head", hook=of_a_made_up_module("deepspeed.runtime.zero.parameter_offload")),
        r"lm_head \(Linear\) has a hook",
    ),
    "hook in a library's namespace": (
        in_a_library("transformers.utils.output_capturing"),
        r"lm_head \(Linear\) has a hook",
    ),
    "hook in a library's wrapper": (around_a_library, r"lm_head \(Linear\) has a hook"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_before_a_patch(change, message, model, undo):
    refused_untouched(change, message, model, undo)


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_under_a_live_patch(change, message, model, undo):
    refused_live(change, message, model, undo)
