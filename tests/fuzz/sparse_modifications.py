"""What people do to mixtures of experts; a model without experts is left as it is."""

import copy
from functools import wraps

import torch
from torch import nn

from tests.fuzz.modifications import doubled, is_sparse

SPARSE_MODIFICATIONS = []


def modification(change):
    SPARSE_MODIFICATIONS.append(change)
    return change


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
