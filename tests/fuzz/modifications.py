"""What people do to models: each either changes what the stock forward computes, or nothing.

A modification takes the model and a `random.Random`; one that does not fit a model does nothing.
"""

import copy
from functools import partial, wraps
from types import MethodType

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import create_selective_checkpoint_contexts

MODIFICATIONS = []


def modification(change):
    MODIFICATIONS.append(change)
    return change


def layer(model, rng):
    return rng.choice(list(model.model.layers))


def is_sparse(mlp):
    return hasattr(mlp, "experts")


def linear(model, rng):
    own = layer(model, rng)
    names = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"]
    if not is_sparse(own.mlp):
        names += ["mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"]
    name = rng.choice(names)
    parent = own.get_submodule(name.rpartition(".")[0])
    return parent, name.rpartition(".")[2]


def activated(model, rng):
    mlp = layer(model, rng).mlp
    return getattr(mlp, "experts", mlp)


def scaled(owner, name, factor):
    setattr(owner, name, getattr(owner, name) * factor)


def doubled(module, operands, output):
    return output * 2 if isinstance(output, torch.Tensor) else output


@modification
def hook_on_base_model(model, rng):
    def halved(module, operands, output):
        output.last_hidden_state = output.last_hidden_state * 0.5
        return output

    model.model.register_forward_hook(halved)


@modification
def forward_of_one_mlp(model, rng):
    mlp = layer(model, rng).mlp
    mlp.forward = MethodType(lambda self, x: type(self).forward(self, x) * 2, mlp)


@modification
def subclass_of_the_mlp(model, rng):
    mlp = layer(model, rng).mlp
    stock = type(mlp)
    mlp.__class__ = type("Mine", (stock,), {"forward": lambda self, x: stock.forward(self, x) * 2})


@modification
def another_class_of_linear(model, rng):
    parent, name = linear(model, rng)
    forward = nn.Linear.forward
    cls = type("Scaled", (nn.Linear,), {"forward": lambda self, x: forward(self, x) * 1.25})
    getattr(parent, name).__class__ = cls


class Adapted(nn.Module):
    """An adapter around a projection."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        make = {"dtype": base.weight.dtype, "bias": False}
        self.down = nn.Linear(base.in_features, 2, **make)
        self.up = nn.Linear(2, base.out_features, **make)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@modification
def adapter_around_a_linear(model, rng):
    parent, name = linear(model, rng)
    setattr(parent, name, Adapted(getattr(parent, name)))


@modification
def dropout_of_one_attention(model, rng):
    layer(model, rng).self_attn.attention_dropout = 0.5
    model.train()


@modification
def bias_of_the_head(model, rng):
    head = model.lm_head
    head.bias = nn.Parameter(torch.randn(head.out_features, dtype=head.weight.dtype))


@modification
def layer_repeated_as_a_copy(model, rng):
    layers = list(model.model.layers)
    layers.insert(rng.randrange(len(layers) + 1), copy.deepcopy(rng.choice(layers)))
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)


@modification
def layer_used_twice(model, rng):
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([*layers, rng.choice(layers)])
    model.config.num_hidden_layers = len(layers) + 1


@modification
def layer_removed(model, rng):
    layers = list(model.model.layers)
    del layers[rng.randrange(len(layers))]
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)


@modification
def layers_in_another_order(model, rng):
    layers = list(model.model.layers)
    rng.shuffle(layers)
    model.model.layers = nn.ModuleList(layers)


@modification
def weight_norm(model, rng):
    parent, name = linear(model, rng)
    module = parametrizations.weight_norm(getattr(parent, name))
    module.parametrizations.weight.original0.data.mul_(1.5)


@modification
def another_norm(model, rng):
    own = layer(model, rng)
    size = model.config.hidden_size
    own.input_layernorm = nn.LayerNorm(size, dtype=own.input_layernorm.weight.dtype)


@modification
def norm_left_out(model, rng):
    attention = layer(model, rng).self_attn
    if hasattr(attention, "q_norm"):
        attention.q_norm = nn.Identity()


@modification
def weights_shared_by_layers(model, rng):
    first, last = model.model.layers[0].mlp, model.model.layers[-1].mlp
    if is_sparse(first) != is_sparse(last):
        return
    if is_sparse(first):
        last.experts.down_proj = first.experts.down_proj
    else:
        last.up_proj.weight = first.up_proj.weight


@modification
def rope_by_config(model, rng):
    model.config.rope_parameters["rope_theta"] *= 7


@modification
def frozen_weights(model, rng):
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)


@modification
def transposed_storage(model, rng):
    parent, name = linear(model, rng)
    weight = getattr(parent, name).weight
    weight.data = weight.data.t().contiguous().t()


@modification
def bias_added_to_a_linear(model, rng):
    parent, name = linear(model, rng)
    module = getattr(parent, name)
    module.bias = nn.Parameter(torch.randn(module.out_features, dtype=module.weight.dtype))


@modification
def weight_as_a_plain_tensor(model, rng):
    parent, name = linear(model, rng)
    module = getattr(parent, name)
    weight = module.weight.detach() * 1.5
    del module.weight
    module.weight = weight


@modification
def gradient_checkpointing(model, rng):
    options = {"use_reentrant": rng.random() < 0.5}
    if rng.random() < 0.3:
        ops = [rng.choice((torch.ops.aten.neg.default, torch.ops.aten.amax.default))]
        kept = partial(create_selective_checkpoint_contexts, ops)
        options = {"use_reentrant": False, "context_fn": kept}
    for _ in range(rng.randint(1, 3)):
        model.gradient_checkpointing_enable(options)
        if rng.random() < 0.3:
            model.gradient_checkpointing_disable()
    model.train()


# Those of one expression.
for _name, _change in {
    "hook_on_lm_head": lambda model, rng: model.lm_head.register_forward_hook(doubled),
    "hook_on_a_layer": lambda model, rng: layer(model, rng).register_forward_hook(doubled),
    "pre_hook_on_a_layer": lambda model, rng: layer(model, rng).register_forward_pre_hook(
        lambda module, operands: (operands[0] * 1.5,)
    ),
    "hook_on_an_activation": lambda model, rng: activated(model, rng).act_fn.register_forward_hook(
        doubled
    ),
    "another_activation": lambda model, rng: setattr(activated(model, rng), "act_fn", nn.ReLU()),
    "hook_on_a_linear": lambda model, rng: getattr(*linear(model, rng)).register_forward_hook(
        doubled
    ),
    "hook_on_a_norm": lambda model, rng: layer(model, rng).input_layernorm.register_forward_hook(
        doubled
    ),
    "hook_on_embeddings": lambda model, rng: model.model.embed_tokens.register_forward_hook(
        doubled
    ),
    "hook_on_rotary": lambda model, rng: model.model.rotary_emb.register_forward_hook(
        lambda module, operands, output: (output[1], output[0])
    ),
    "edited_frequencies": lambda model, rng: model.model.rotary_emb.inv_freq.mul_(0.5),
    "edited_attention_scale": lambda model, rng: scaled(layer(model, rng).self_attn, "scaling", 2),
    "edited_rotary_scaling": lambda model, rng: scaled(
        model.model.rotary_emb, "attention_scaling", 1.5
    ),
    "attention_to_the_future": lambda model, rng: setattr(
        layer(model, rng).self_attn, "is_causal", False
    ),
    "embedding_with_max_norm": lambda model, rng: setattr(
        model.model.embed_tokens, "max_norm", 0.5
    ),
    "gradients_scaled_by_frequency": lambda model, rng: setattr(
        model.model.embed_tokens, "scale_grad_by_freq", True
    ),
    "edited_epsilon": lambda model, rng: setattr(
        layer(model, rng).input_layernorm, "variance_epsilon", 0.5
    ),
    "epsilon_by_config": lambda model, rng: setattr(model.config, "rms_norm_eps", 0.5),
    "window_set_later": lambda model, rng: setattr(
        layer(model, rng).self_attn, "sliding_window", 4
    ),
    "activation_by_config": lambda model, rng: setattr(
        model.config, "hidden_act", "gelu_pytorch_tanh"
    ),
    "unused_attribute": lambda model, rng: setattr(layer(model, rng), "residual_multiplier", 0.5),
    "unused_buffer": lambda model, rng: layer(model, rng).register_buffer("note", torch.zeros(1)),
    "soft_cap": lambda model, rng: setattr(model.config, "final_logit_softcapping", 1.0),
    "grouping_edited": lambda model, rng: setattr(
        layer(model, rng).self_attn, "num_key_value_groups", 1
    ),
    "one_module_in_fp32": lambda model, rng: layer(model, rng).mlp.float(),
    "dtype_of_all": lambda model, rng: model.to(torch.float32),
    "pruned_weight": lambda model, rng: prune.l1_unstructured(
        getattr(*linear(model, rng)), "weight", amount=0.5
    ),
    "head_untied": lambda model, rng: setattr(
        model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().clone() * 1.5)
    ),
    "fewer_layers_by_config": lambda model, rng: setattr(
        model.config, "num_hidden_layers", max(model.config.num_hidden_layers - 1, 1)
    ),
}.items():
    _change.__name__ = _name
    modification(_change)


# Of mixtures of experts; a model without experts is left as it is.


def block(model, rng):
    """A sparse block, None if the model has none."""
    blocks = [layer.mlp for layer in model.model.layers if is_sparse(layer.mlp)]
    return rng.choice(blocks) if blocks else None


def sparse_modification(change):
    """A modification of one sparse block."""

    @wraps(change)
    def of_a_block(model, rng):
        if (chosen := block(model, rng)) is not None:
            change(chosen, rng)

    return modification(of_a_block)


@sparse_modification
def subclass_of_the_experts(mlp, rng):
    stock = type(mlp.experts)
    forward = lambda self, *operands: stock.forward(self, *operands) * 2  # noqa: E731
    mlp.experts.__class__ = type("Mine", (stock,), {"forward": forward})


@sparse_modification
def router_that_prefers_one_expert(mlp, rng):
    mlp.gate.weight.data[rng.randrange(mlp.gate.num_experts)] *= 30


@sparse_modification
def experts_that_are_equal(mlp, rng):
    for parameter in (mlp.experts.gate_up_proj, mlp.experts.down_proj):
        parameter.data.copy_(parameter.data[:1].expand_as(parameter).clone())


@sparse_modification
def experts_stored_transposed(mlp, rng):
    weights = mlp.experts.down_proj
    weights.data = weights.data.transpose(1, 2).contiguous().transpose(1, 2)


@sparse_modification
def shared_expert(mlp, rng):
    size = mlp.gate.hidden_dim
    mlp.shared_expert = nn.Linear(size, size, dtype=mlp.gate.weight.dtype)


@modification
def experts_per_token_by_config(model, rng):
    if hasattr(model.config, "num_experts_per_tok"):
        model.config.num_experts_per_tok += 1


@modification
def another_implementation_of_experts(model, rng):
    model.config._experts_implementation = rng.choice(["eager", "grouped_mm", "batched_mm"])


@modification
def router_logits_asked_for(model, rng):
    model.config.output_router_logits = True


# Those of one expression.
for _name, _change in {
    "hook_on_a_block": lambda mlp, rng: mlp.register_forward_hook(doubled),
    "hook_on_experts": lambda mlp, rng: mlp.experts.register_forward_hook(doubled),
    "hook_on_a_router": lambda mlp, rng: mlp.gate.register_forward_hook(
        lambda module, operands, out: (out[0], out[1] * 2, out[2])
    ),
    "other_experts_per_token": lambda mlp, rng: setattr(
        mlp.gate, "top_k", rng.randint(1, mlp.gate.num_experts)
    ),
    "weights_of_experts_not_normalised": lambda mlp, rng: setattr(
        mlp.gate, "norm_topk_prob", not getattr(mlp.gate, "norm_topk_prob", True)
    ),
    "frozen_experts": lambda mlp, rng: mlp.experts.requires_grad_(False),
    "frozen_router": lambda mlp, rng: mlp.gate.weight.requires_grad_(False),
    "experts_in_fp32": lambda mlp, rng: mlp.experts.float(),
    "router_in_fp32": lambda mlp, rng: mlp.gate.float(),
    "correction_of_a_router": lambda mlp, rng: mlp.gate.register_buffer(
        "e_score_correction_bias", torch.ones(mlp.gate.num_experts)
    ),
    "fewer_experts": lambda mlp, rng: setattr(
        mlp.experts, "num_experts", mlp.experts.num_experts - 1
    ),
    "experts_replaced_by_a_copy": lambda mlp, rng: setattr(
        mlp, "experts", copy.deepcopy(mlp.experts)
    ),
    "jitter": lambda mlp, rng: setattr(mlp, "jitter_noise", 0.5),
}.items():
    _change.__name__ = _name
    sparse_modification(_change)
