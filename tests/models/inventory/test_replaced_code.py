"""Code that a stock forward reads and another library replaced is refused by name, before a patch
and under a live one."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import activations
from transformers.activations import ACT2FN
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.deprecation import deprecate_kwarg

from rl_consistency.models import families, inventory
from rl_consistency.models.families import UnsupportedModelError, modeling
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset, preset_config

PRESETS = (
    *("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"),
    *("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"),
)


def own(*given, **named):
    raise AssertionError("not called")


def of_torch(name, module=F):
    return lambda monkeypatch, config: monkeypatch.setattr(module, name, own)


def of_masks(name):
    return lambda monkeypatch, config: monkeypatch.setattr(modeling(config), name, own)


def registered(monkeypatch, config):
    masks = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, config._attn_implementation, own)


def wrapped(monkeypatch, config):
    """As transformers 5.17 wraps its own functions of masks."""
    inside = deprecate_kwarg("old", version="9.9.9", new_name="given")(own)
    monkeypatch.setattr(modeling(config), "create_causal_mask", inside)


REPLACED = {
    "wrapped mask": (wrapped, "create_causal_mask was replaced by .*deprecat"),
    "linear": (of_torch("linear"), "^torch.nn.functional.linear was|not covered: torch.nn.fun"),
    "sdpa": (of_torch("scaled_dot_product_attention"), "dot_product_attention was replaced"),
    "matmul": (of_torch("matmul", torch), "torch.matmul was replaced"),
    "gelu": (of_torch("gelu"), "torch.nn.functional.gelu was replaced"),
    "topk": (of_torch("topk", torch), "torch.topk was replaced"),
    "tanh": (of_torch("tanh", torch), "torch.tanh was replaced"),
    "rsqrt": (of_torch("rsqrt", torch), "torch.rsqrt was replaced"),
    "mask": (of_masks("create_causal_mask"), "create_causal_mask was replaced by"),
    "registered mask": (registered, "the mask of attention .* is a function of tests"),
    "_call_impl": (
        of_torch("_call_impl", nn.Module),
        "Module was replaced by a class with another _call_impl",
    ),
}


@pytest.mark.parametrize("replace, message", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mixtral"])
def test_a_replaced_function_is_refused(preset, replace, message, monkeypatch):
    model = build_preset(preset)
    with monkeypatch.context() as patched:
        replace(patched, model.config)
        with pytest.raises(UnsupportedModelError, match=message):
            patch(model)
    with patch(model):
        token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])
        replace(monkeypatch, model.config)
        with pytest.raises(UnsupportedModelError, match=message):
            token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])


def test_a_function_that_was_replaced_before_the_import_is_refused(monkeypatch):
    monkeypatch.setattr(F, "linear", own)
    monkeypatch.setitem(families._TORCH, "linear", (F, own))
    with pytest.raises(UnsupportedModelError, match="torch.nn.functional.linear was replaced by"):
        patch(build_preset("tiny-qwen3"))


UNWATCHED = {
    *("arange", "empty", "empty_like", "ones", "tensor", "zeros", "zeros_like", "no_grad"),
    # Where tokens of an expert are, and how many.
    *("where", "greater", "histc", "bincount"),
    # The balance loss, dropout, and activations that are not covered.
    *("repeat_interleave", "sum", "min", "dropout", "clip", "erf", "expm1", "log"),
    *("relu", "sigmoid", "softplus", "square"),
}
"""Functions that these files call and that no covered forward takes a value from."""


def test_all_functions_of_torch_are_watched_that_covered_forwards_take_values_from():
    called = set()
    for module in (activations, *map(modeling, map(preset_config, PRESETS))):
        text = Path(module.__file__).read_text()
        called |= set(re.findall(r"\b(?:torch|F|nn\.functional)\.([a-z_0-9]+)\(", text))
    assert {"topk", "tanh"} <= called and called - set(families._TORCH) <= UNWATCHED


class Shifted(nn.Module):
    def forward(self, input):
        return F.silu(input) + 1


def test_an_activation_of_the_user_s_is_refused(monkeypatch):
    monkeypatch.setitem(ACT2FN, "silu", Shifted)
    with pytest.raises(UnsupportedModelError, match="Shifted"):
        patch(build_preset("tiny-llama"))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, activations.ACT2CLS["relu2"]])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"])
def test_another_activation_under_the_name_is_refused(preset, activation, monkeypatch):
    """Its class is a library's own, and the model that the config makes has it too."""
    monkeypatch.setitem(ACT2FN, "silu", activation)
    with pytest.raises(UnsupportedModelError, match="act_fn .* computes another function than sil"):
        patch(build_preset(preset))


@pytest.mark.parametrize("name", families.ACTIVATIONS)
def test_every_covered_activation_is_what_transformers_computes(name):
    known = families.ACTIVATIONS
    alike = {other for other in known if inventory._computes(ACT2FN[other], name)}
    assert alike == {other for other in known if known[other] == known[name]}


SET_BY_INIT = [
    ("TopKRouter", "norm_topk_prob", True),
    ("Experts", "act_fn", nn.GELU()),
    ("Attention", "is_causal", False),
    ("Attention", "attention_dropout", 0.5),
]


@pytest.mark.parametrize("part, attribute, value", SET_BY_INIT)
def test_a_replaced_init_is_refused(part, attribute, value, monkeypatch):
    """The model that the config makes is made by it too."""
    cls = getattr(modeling(preset_config("tiny-qwen3-moe")), f"Qwen3Moe{part}")
    made = cls.__init__

    def init(self, *given, **named):
        made(self, *given, **named)
        setattr(self, attribute, value)

    monkeypatch.setattr(cls, "__init__", init)
    model = build_preset("tiny-qwen3-moe")
    with pytest.raises(UnsupportedModelError, match=f"Qwen3Moe{part} was replaced by .* __init__"):
        patch(model)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_bidirectional_attention_is_refused(preset):
    config = preset_config(preset)
    config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is_causal=False, .*bidirectional"):
        families.check_config(config)
    model = build_preset(preset)
    with patch(model):
        token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])
        model.config.is_causal = False
        with pytest.raises(UnsupportedModelError, match="is_causal"):
            token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])


def test_the_linear_map_of_zero_3_is_known(monkeypatch):
    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    monkeypatch.setattr(F, "linear", linear.zero3_linear_wrap)
    model = build_preset("tiny-qwen3")
    with patch(model) as session:
        assert session.live
