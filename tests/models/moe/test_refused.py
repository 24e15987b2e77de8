"""What the patched forward of a sparse model would pass over is refused by name."""

import copy
import functools
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.integrations import moe as moe_integration
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rl_consistency.models import families
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset
from tests.models.inventory.test_inventory import (
    at,
    hooked,
    in_config,
    refused_untouched,
    replaced,
    set_on,
)

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
BLOCK = "model.layers.1.mlp"
EXPERTS = f"{BLOCK}.experts"


@pytest.mark.parametrize(
    "config, message",
    [
        (MixtralConfig(**SMALL, router_jitter_noise=0.1), r"router_jitter_noise=0.1 \(set it to"),
        (OlmoeConfig(**SMALL, clip_qkv=8.0), r"clip_qkv=8.0 \(covered: None\)"),
        (OlmoeConfig(**SMALL, sliding_window=8), "sliding_window=8, which some attention"),
        (OlmoeConfig(**SMALL, output_router_logits=True), "output_router_logits=True, .* no sum"),
        (MixtralConfig(**SMALL, output_router_logits=True), "output_router_logits=True"),
        (Qwen3MoeConfig(**SMALL, hidden_act="relu"), "hidden_act 'relu'"),
        (Qwen3MoeConfig(**SMALL, num_experts=4), "num_experts_per_tok=8 of 4 experts"),
        (OlmoeConfig(**SMALL, num_experts=0), "num_experts_per_tok=8 of 0 experts"),
        (MixtralConfig(**SMALL, num_local_experts=0), "num_experts_per_tok=2 of 0 experts"),
        (Qwen3MoeConfig(**SMALL, attention_dropout=0.5), "active dropout"),
        (Qwen3MoeConfig(**SMALL, decoder_sparse_step=0), r"decoder_sparse_step=0 \(covered: 1"),
        (Qwen3MoeConfig(**SMALL, quantization_config={"bits": 8}), "quantization_config"),
    ],
)
def test_an_uncovered_setting_is_named(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        families.check_config(config)


class OtherExperts(modeling_qwen3_moe.Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) * 0.5


def other_experts(model, undo):
    layer = model.get_submodule(BLOCK)
    layer.experts = OtherExperts(model.config)


def own_implementation(model, undo):
    def nothing(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states

    mapping = moe_integration.ALL_EXPERTS_FUNCTIONS._local_mapping
    undo.enter_context(mock.patch.dict(mapping, own=nothing))
    model.config._experts_implementation = "own"


@functools.wraps(modeling_qwen3_moe.Qwen3MoeExperts.forward)
def half_experts(self, *args):
    return half_experts.__wrapped__(self, *args) * 0.5


def of_its_own(path, **values):
    """As in a layer that was copied, and then edited."""

    def change(model, undo):
        part = model.get_submodule(path)
        part.config = copy.deepcopy(model.config)
        for name, value in values.items():
            setattr(part.config, name, value)

    return change


def own_implementation_of_a_part(model, undo):
    own_implementation(model, undo)
    model.config._experts_implementation = None
    of_its_own(EXPERTS, _experts_implementation="own")(model, undo)


def instance_forward(model, undo):
    experts = model.get_submodule(EXPERTS)
    experts.forward = functools.partial(modeling_qwen3_moe.Qwen3MoeExperts.forward, experts)


def one_ranks_share(model, undo):
    """As transformers' plans leave it."""
    experts = model.get_submodule(EXPERTS)
    experts._is_expert_parallel, experts.num_experts = True, 6
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[:6]))


def fewer_experts(model, undo):
    experts = model.get_submodule(EXPERTS)
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[:6])


def with_bias(gate):
    gate.register_buffer("e_score_correction_bias", torch.ones(12))


clipped_part = of_its_own("model.layers.1.self_attn", clip_qkv=0.01)
other_gate = replaced(modeling_qwen3_moe.Qwen3MoeExperts, "_apply_gate", lambda self, x: x)
other_forward = replaced(modeling_qwen3_moe.Qwen3MoeExperts, "forward", half_experts)
other_block = replaced(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, "forward", lambda self, x: x)

REFUSED = {
    "experts of another class": (other_experts, r"experts \(OtherExperts\) has no canonical order"),
    "an implementation of its own": (own_implementation, "experts implementation 'own' is a"),
    "of a part's own": (own_implementation_of_a_part, "experts implementation 'own' is a"),
    "a setting of a part's own": (
        clipped_part,
        "self_attn .* has clip_qkv=0.01 in a config of",
    ),
    "no config": (set_on(EXPERTS, config=None), "experts .* has a NoneType in the place of its"),
    "another gate function": (other_gate, "_apply_gate is a function of"),
    "another forward of the class": (
        other_forward,
        "Experts was replaced by .* another forward",
    ),
    "another block's forward": (other_block, "SparseMoeBlock was replaced by .* another forward"),
    "a forward of the instance": (instance_forward, r"experts .* had its forward replaced"),
    "a gate of the instance": (
        set_on(EXPERTS, _apply_gate=abs),
        "experts .* its own _apply_gate",
    ),
    "hook on the experts": (hooked(EXPERTS), r"experts \(Qwen3MoeExperts\) has a hook"),
    "hook before the experts": (hooked(EXPERTS, "forward_pre"), "experts .* has a hook"),
    "hook on the router": (hooked(f"{BLOCK}.gate"), r"gate \(Qwen3MoeTopKRouter\) has a hook"),
    "hook on the activation": (hooked(f"{EXPERTS}.act_fn"), "act_fn .* has a hook"),
    "one rank's share": (one_ranks_share, "experts is split over ranks .* expert parallelism"),
    "a plan": (set_on("", _tp_size=2), "root is split over ranks"),
    "mixed dtypes": (at(EXPERTS, nn.Module.bfloat16), "gate_up_proj is torch.bfloat16, the first"),
    "a correction bias": (at(f"{BLOCK}.gate", with_bias), "gate .* has buffers {'e_score_corr"),
    "fewer experts": (fewer_experts, "experts .* has parameters"),
    "another activation": (set_on(EXPERTS, act_fn=nn.ReLU()), r"experts.act_fn \(ReLU\)"),
    "another number per token": (set_on(f"{BLOCK}.gate", top_k=2), "gate .* has top_k=2"),
    "weights as they are": (set_on(f"{BLOCK}.gate", norm_topk_prob=False), "has norm_topk_prob=F"),
    "logits asked for": (in_config(output_router_logits=True), "output_router_logits=True"),
    "no list of dense layers": (in_config(mlp_only_layers=None), "mlp_only_layers=None"),
    "fewer per token in the config": (in_config(num_experts_per_tok=2), "has (num_experts|top_k)"),
}


@pytest.fixture
def model():
    return build_preset("tiny-qwen3-moe")


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_the_forward_would_pass_over_is_refused_untouched(change, message, model, undo):
    refused_untouched(change, message, model, undo)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"experts of another class"}))
def test_a_live_patch_refuses_the_same_before_a_number_is_computed(name, model, undo):
    change, message = REFUSED[name]
    ids = torch.arange(9).unsqueeze(0)
    with patch(model) as session:
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=8)
        model(input_ids=ids)
        change(model, undo)
        for compute in (
            lambda: model(input_ids=ids),
            lambda: engine.generate([[1, 2]], SamplingParams(max_tokens=2)),
        ):
            with pytest.raises(UnsupportedModelError, match=message):
                compute()
        assert not session.live


def test_the_router_logits_of_a_call_are_refused(model):
    with patch(model), pytest.raises(ValueError, match="given output_router_logits"):
        model(input_ids=torch.arange(9).unsqueeze(0), output_router_logits=True)
