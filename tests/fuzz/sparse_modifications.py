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
def hook_on_a_block(mlp, rng):
    mlp.register_forward_hook(doubled)


@sparse_modification
def hook_on_experts(mlp, rng):
    mlp.experts.register_forward_hook(doubled)


@sparse_modification
def hook_on_a_router(mlp, rng):
    mlp.gate.register_forward_hook(lambda module, operands, out: (out[0], out[1] * 2, out[2]))


@sparse_modification
def other_experts_per_token(mlp, rng):
    mlp.gate.top_k = rng.randint(1, mlp.gate.num_experts)


@sparse_modification
def weights_of_experts_not_normalised(mlp, rng):
    mlp.gate.norm_topk_prob = not getattr(mlp.gate, "norm_topk_prob", True)


@sparse_modification
def frozen_experts(mlp, rng):
    for parameter in mlp.experts.parameters():
        parameter.requires_grad_(False)


@sparse_modification
def frozen_router(mlp, rng):
    mlp.gate.weight.requires_grad_(False)


@sparse_modification
def experts_in_fp32(mlp, rng):
    mlp.experts.float()


@sparse_modification
def router_in_fp32(mlp, rng):
    mlp.gate.float()


@sparse_modification
def subclass_of_the_experts(mlp, rng):
    stock = type(mlp.experts)
    forward = lambda self, *operands: stock.forward(self, *operands) * 2  # noqa: E731
    mlp.experts.__class__ = type("Mine", (stock,), {"forward": forward})


@sparse_modification
def correction_of_a_router(mlp, rng):
    mlp.gate.register_buffer("e_score_correction_bias", torch.ones(mlp.gate.num_experts))


@sparse_modification
def fewer_experts(mlp, rng):
    mlp.experts.num_experts -= 1


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
def experts_replaced_by_a_copy(mlp, rng):
    mlp.experts = copy.deepcopy(mlp.experts)


@sparse_modification
def jitter(mlp, rng):
    mlp.jitter_noise = 0.5


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
