"""A policy inside the wrappers of several processes: the same bytes as a plain one, or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.models.sharding import is_shard, unwrapped
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.gradients import check_gradients
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.weights import model_digest
from rl_consistency.verify.presets import build_preset
from tests.ranks import run_ranks

__all__ = ["run_ranks"]

SEQUENCES = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11], [4, 5, 4, 5, 100, 101]]
PROMPTS = [2, 3, 2]


def loss_of(model, parts=(0, 1, 2)):
    sequences, prompts = [SEQUENCES[i] for i in parts], [PROMPTS[i] for i in parts]
    return -token_logprobs(model, sequences, prompt_lengths=prompts).logprobs.sum() / 10


def share(scored, indices):
    return -scored.logprobs.sum() / 10


def rolled_out(engine):
    sampling = SamplingParams(n=2, max_tokens=8, seed=3)
    drawn = engine.generate(SEQUENCES[:2], sampling)
    return [(c.token_ids, c.token_logprobs.tolist()) for c in drawn]


def sharded(world, dtype, preset="tiny-qwen3", part="", **precision):
    """A policy under FSDP2, with fp32 masters of `dtype` weights, by layers or one part of them."""
    policy = build_preset(preset, dtype).train()
    session = patch(policy, grad_dtype=torch.float32)
    policy.float()
    mesh = init_device_mesh("cpu", (world.size,))
    given = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, **precision)
    for module in [*(layer.get_submodule(part) for layer in policy.model.layers), policy]:
        fully_shard(module, mesh=mesh, mp_policy=given)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return policy, session


def whole_gradients(policy):
    return {name: p.grad.full_tensor() for name, p in policy.named_parameters()}


def own_gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def under_fsdp2(world, dtype, preset="tiny-qwen3"):
    plain = build_preset(preset, dtype).train()
    patch(plain, grad_dtype=torch.float32)
    policy, session = sharded(world, dtype, preset)
    found = {"faults": session.faults()}
    found["logprobs"] = torch.equal(loss_of(policy), loss_of(plain))
    for index in range(3):
        policy.set_requires_gradient_sync(index == 2)
        loss = loss_of(policy, [index])
        (loss if world.rank == 0 else loss * 0.0).backward()
        loss_of(plain, [index]).backward()
    gradients = whole_gradients(policy)
    found["gradients"] = parameter_digest(gradients) == parameter_digest(own_gradients(plain))
    engine = RolloutEngine(policy, eos_token_id=None)
    expected = rolled_out(RolloutEngine(plain, eos_token_id=None))
    found["rollouts"] = [rolled_out(engine) == expected for _ in range(2)]
    found["digests"] = (
        model_digest(policy) == model_digest(plain),
        (parameter_digest(policy) == parameter_digest(plain)),
    )
    with whole_weights(policy) as inside, whole_weights(policy):
        found["whole"] = inside is policy, any(map(is_shard, policy.parameters()))
        found["scored"] = torch.equal(loss_of(policy), loss_of(plain))
    found["shards"] = all(map(is_shard, policy.parameters()))
    report = check_gradients(policy, SEQUENCES, prompt_lengths=PROMPTS, loss=share)
    found["check"] = report.passed and report.elements == sum(p.numel() for p in plain.parameters())
    kept = parameter_digest(whole_gradients(policy))
    found["kept"] = kept == parameter_digest(gradients)
    with pytest.raises(ValueError, match="shards: enter whole_weights"):
        engine.submit(SEQUENCES[:1], SamplingParams(max_tokens=2))
    with session.stock() as stock:
        found["stock"] = type(stock).__name__, isinstance(stock, FSDPModule)
    found["again"] = session.live
    policy.zero_grad()
    session.restore()
    found["restored"] = type(policy).__name__
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype, preset", [(torch.float32, "tiny-qwen3"), (torch.bfloat16, "tiny-qwen3-moe")]
)
def test_fsdp2_has_the_bytes_of_a_plain_policy(run_ranks, dtype, preset):
    family = "Qwen3Moe" if "moe" in preset else "Qwen3"
    for found in run_ranks(2, under_fsdp2, dtype, preset):
        assert found == {
            **dict.fromkeys(("logprobs", "gradients", "scored", "shards", "check", "kept"), True),
            "faults": [],
            "rollouts": [True, True],
            "digests": (True, True),
            "whole": (True, False),
            "stock": (f"FSDP{family}ForCausalLM", True),
            "again": True,
            "restored": f"FSDP{family}ForCausalLM",
        }


def around_a_part(world, preset, parts):
    """Logprobs and gradients under FSDP2's default, which casts what it finds in arguments."""
    plain = build_preset(preset, torch.bfloat16).train()
    patch(plain, grad_dtype=torch.float32)
    expected = loss_of(plain)
    expected.backward()
    digest, found = parameter_digest(own_gradients(plain)), {}
    for part in parts:
        policy, _ = sharded(world, torch.bfloat16, preset, part)
        loss = loss_of(policy)
        (loss if world.rank == 0 else loss * 0.0).backward()
        same = parameter_digest(whole_gradients(policy)) == digest
        found[part] = torch.equal(loss, expected), same
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "preset, parts",
    [
        ("tiny-qwen3", ("self_attn", "mlp")),
        ("tiny-mixtral", ("self_attn", "mlp", "mlp.experts", "mlp.gate")),
    ],
)
def test_fsdp2_around_a_part_of_a_layer_has_the_bytes_of_a_plain_policy(run_ranks, preset, parts):
    for found in run_ranks(2, around_a_part, preset, parts):
        assert found == dict.fromkeys(parts, (True, True))


def with_other_ways(world):
    plain = build_preset("tiny-qwen3", torch.bfloat16).train()
    patch(plain)
    expected = token_logprobs(plain, SEQUENCES, prompt_lengths=PROMPTS).logprobs
    found = {}
    policy, _ = sharded(world, torch.bfloat16, cast_forward_inputs=True)
    scored = token_logprobs(policy, SEQUENCES, prompt_lengths=PROMPTS)
    found["cast inputs"] = torch.equal(scored.logprobs, expected)
    twin = copy.deepcopy(plain)
    patch(twin)
    wrapper = DistributedDataParallel(twin)
    inside = []
    for model in (twin, wrapper):
        try:
            loss_of(model, [world.rank]).backward()
        except ConsistencyError as error:
            inside.append(str(error))
    found["inside"] = inside
    own = parameter_digest(own_gradients(twin))
    found["synchronised"] = len(set(world.gather("gradients", own))) == 1
    with torch.no_grad():
        found["no gradients"] = torch.equal(loss_of(twin), loss_of(wrapper))
    found["unwrapped"] = unwrapped(wrapper) is twin
    found["check"] = check_gradients(wrapper, SEQUENCES, prompt_lengths=PROMPTS, loss=share).passed
    return found


def test_other_wrappers_are_passed_through_or_refused(run_ranks):
    for found in run_ranks(2, with_other_ways):
        assert found.pop("inside") == [
            "this is the inside of a DistributedDataParallel, which would not sum its gradients "
            "over the ranks. Give the DistributedDataParallel itself."
        ]
        assert set(found.values()) == {True}, found


def test_a_policy_without_wrappers_is_its_own():
    model = nn.Linear(2, 2)
    assert unwrapped(model) is model
    with whole_weights(model) as inside:
        assert inside is model


def test_a_compiled_policy_is_named():
    with pytest.raises(ValueError, match="torch.compile's wrapper"):
        unwrapped(torch.compile(nn.Linear(2, 2)))
