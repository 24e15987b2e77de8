import json
import math
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.kernels.reduction.sums import gradient_norm
from rl_consistency.models.patch import patch
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.trainers.algorithms.critic import CriticModel
from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.strategy import (
    Replicated,
    decaying,
    trained_parameters,
)
from rl_consistency.verify.presets import PRESETS, build_preset

RATE = 1e-2


def small_model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model = model.to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    return model


def give_gradients(model, step=0, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def optimizer_of(model, *, total_steps=10, **changes):
    section = OptimizerSection(**{"learning_rate": RATE, "max_grad_norm": None} | changes)
    ranks = Replicated(World.join(torch.device("cpu")), PartOrder(1), model)
    return PolicyOptimizer(ranks, section, total_steps=total_steps)


def plain_adamw(parameters, **changes):
    given = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | changes
    return torch.optim.AdamW(parameters, foreach=False, fused=False, **given)


@pytest.mark.parametrize("decay_norms", [False, True])
def test_an_fp32_policy_is_its_own_master_and_steps_as_adamw_does(decay_norms):
    model, twin = small_model(), small_model()
    given = {"betas": (0.8, 0.95), "eps": 1e-6}
    optimizer = optimizer_of(model, weight_decay=0.1, decay_norms=decay_norms, **given)
    weights = [{"params": [twin[0].weight, twin[1].weight], "weight_decay": 0.1}]
    biases = [{"params": [twin[0].bias], "weight_decay": 0.1 * decay_norms}]
    reference = plain_adamw(weights + biases, **given)
    for step in range(3):
        give_gradients(model, step)
        give_gradients(twin, step)
        optimizer.step()
        reference.step()
    assert parameter_digest(model) == parameter_digest(twin)
    assert not any(name.endswith(".master") for name in optimizer.tensors())


class Reward(nn.Module):
    """Names and modules that transformers' rule tells apart, and some that look like them."""

    def __init__(self):
        super().__init__()
        self.norm, self.plain = nn.LayerNorm(2), nn.ModuleDict({"final": nn.LayerNorm(2)})
        self.normal, self.q_norm_proj = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.Ln_RMSNorm = nn.Linear(2, 2, bias=False)
        self.rebiased, self.frozen = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)


@pytest.mark.parametrize("preset", [*PRESETS, "critic", "others"])
def test_what_decays_is_what_transformers_trainer_decays(preset):
    model = Reward() if preset == "others" else build_preset("tiny-qwen3")
    if preset in PRESETS:
        model = build_preset(preset)
    elif preset == "critic":
        model = CriticModel(model, seed=0)
    theirs = Trainer.get_decay_parameter_names(None, model)
    kept = trained_parameters(model).keys() - decaying(model)
    assert decaying(model) == {*theirs} & trained_parameters(model).keys() and kept
    with patch(model) if preset in PRESETS else nullcontext():
        assert decaying(model) == trained_parameters(model).keys() - kept


@pytest.mark.parametrize("decay_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_gradient_only_matrices_shrink(dtype, decay_norms):
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)}).to(dtype)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad_dtype = torch.float32
    given = {"weight_decay": 0.5, "learning_rate": 0.5, "decay_norms": decay_norms}
    first = optimizer_of(model, **given)
    for optimizer in (first, optimizer_of(model, **given)):  # the second as one that is resumed
        if optimizer is not first:
            optimizer.load(first.tensors(), first.schedule_state())
        for parameter in model.parameters():
            parameter.grad = torch.zeros(parameter.shape)
        optimizer.step()
    shrunk = {name for name, p in model.named_parameters() if (p == 0.75**2).all()}
    kept = {name for name, p in model.named_parameters() if (p == 1).all()}
    assert shrunk == ({*shrunk} | {*kept} if decay_norms else {"up.weight"})
    assert len(shrunk | kept) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_policy_follows_fp32_masters_rounded_into_it_in_place(dtype):
    model = small_model(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    optimizer, reference = optimizer_of(model), plain_adamw(masters)
    for step in range(3):
        give_gradients(model, step)
        for master, parameter in zip(masters, model.parameters()):
            assert parameter.grad is not None
            master.grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
    for parameter, master in zip(model.parameters(), masters):
        assert torch.equal(parameter, master.to(dtype))
    assert [p.data_ptr() for p in model.parameters()] == places


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_returned():
    model, twin = small_model(), small_model()
    give_gradients(model, scale=7.0)
    give_gradients(twin, scale=7.0)
    norm = float(gradient_norm([p.grad for p in twin.parameters() if p.grad is not None]))
    total = sum(float(p.grad.double().square().sum()) for p in twin.parameters())  # type: ignore
    assert norm == pytest.approx(math.sqrt(total), rel=1e-6)
    for parameter in twin.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * (0.5 / norm)
    reference = plain_adamw(twin.parameters(), eps=1.0)
    reference.step()
    assert optimizer_of(model, max_grad_norm=0.5, eps=1.0).step() == norm
    assert parameter_digest(model) == parameter_digest(twin)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_raises_and_changes_nothing(value, dtype):
    model = small_model(dtype)
    optimizer = optimizer_of(model, schedule="linear")
    give_gradients(model)
    optimizer.step()
    weights, rate = parameter_digest(model), optimizer.learning_rate
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    give_gradients(model, 1)
    model[1].weight.grad[0, 0] = value
    with pytest.raises(ValueError, match="gradient norm is .*no weight was changed"):
        optimizer.step()
    assert parameter_digest(model) == weights and optimizer.learning_rate == rate
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.tensors().items())


def test_a_missing_gradient_is_named_and_changes_nothing():
    model = small_model()
    before = parameter_digest(model)
    give_gradients(model)
    model[1].weight.grad = None
    with pytest.raises(ValueError, match=r"parameter 1\.weight has no gradient"):
        optimizer_of(model).step()
    assert parameter_digest(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 3])
def test_a_restored_optimizer_continues_bit_for_bit(dtype, done, tmp_path):
    settings = {"schedule": "cosine", "warmup_steps": 2, "max_grad_norm": 1.0}

    def run(model, optimizer, steps):
        rates = []
        for step in steps:
            rates.append(optimizer.learning_rate)
            give_gradients(model, step)
            optimizer.step()
        return rates

    whole = small_model(dtype)
    expected = run(whole, optimizer_of(whole, **settings), range(7))

    model = small_model(dtype)
    first = optimizer_of(model, **settings)
    rates = run(model, first, range(done))
    save_file(first.tensors(), tmp_path / "o.safetensors")
    saved = json.dumps(first.schedule_state())
    second = optimizer_of(model, **settings)
    second.load(load_file(tmp_path / "o.safetensors"), json.loads(saved))
    rates += run(model, second, range(done, 7))
    assert rates == expected
    assert parameter_digest(model) == parameter_digest(whole)


def test_names_that_begin_alike_do_not_exchange_their_state():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "a_weight": nn.Linear(2, 2)})
    first = optimizer_of(model)
    give_gradients(model)
    first.step()
    state = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second = optimizer_of(model)
    second.load(state, first.schedule_state())
    assert second.tensors().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in second.tensors().items())


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 2, [0, 1 / 2, 1, 1, 1, 1]),
        ("linear", 2, [0, 1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 2, [0, 1 / 2, *((1 + math.cos(math.pi * n / 4)) / 2 for n in range(4))]),
        ("constant_with_warmup", 2, [0, 1 / 2, 1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("end", [0.0, 0.25])
def test_the_learning_rate_follows_its_schedule(schedule, warmup, expected, end):
    stays = schedule.startswith("constant")
    end *= not stays
    model = small_model()
    given = {"schedule": schedule, "warmup_steps": warmup, "total_steps": 6}
    optimizer = optimizer_of(model, min_lr=RATE * end or None, **given)
    expected = [x if i < warmup else end + (1 - end) * x for i, x in enumerate(expected)]
    rates = []
    for step in range(6):
        rates.append(optimizer.learning_rate)
        give_gradients(model, step)
        optimizer.step()
    assert rates == pytest.approx([RATE * share for share in expected])
    assert optimizer.learning_rate == pytest.approx(RATE if stays else RATE * end)
    same = optimizer_of(model, min_lr_ratio=end, **given)
    assert [f(5) for f in same._schedule.lr_lambdas] == [
        f(5) for f in optimizer._schedule.lr_lambdas
    ]


def test_a_warm_up_of_all_steps_ends_them():
    model = small_model()
    given = {"schedule": "linear", "min_lr_ratio": 0.25, "warmup_steps": 2, "total_steps": 2}
    optimizer = optimizer_of(model, **given)
    for step in range(2):
        assert optimizer.learning_rate == RATE * step / 2
        give_gradients(model, step)
        optimizer.step()


def layered_model(dtype=torch.float32):
    """Names as a policy has them: two matrices of a layer, beside them what Muon leaves out."""
    generator = torch.Generator().manual_seed(0)
    layer = {"up": nn.Linear(64, 96), "down": nn.Linear(96, 64, bias=False)}
    layers = nn.ModuleList([nn.ModuleDict(layer | {"norm": nn.LayerNorm(64, bias=False)})])
    outer = {"embed_tokens": nn.Embedding(80, 64), "layers": layers}
    model = nn.ModuleDict({"model": nn.ModuleDict(outer), "lm_head": nn.Linear(64, 80, bias=False)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model = model.to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    model, twin = layered_model(), layered_model()
    muon = {"momentum": 0.9, "adjust_lr_fn": "original", "adamw_learning_rate": 1e-3}
    optimizer = optimizer_of(model, name="muon", muon=muon, weight_decay=0.1)
    (layer,), head = twin["model"]["layers"], twin["lm_head"]
    inner = [layer["up"].weight, layer["down"].weight]
    outer = [{"params": [twin["model"]["embed_tokens"].weight, head.weight], "weight_decay": 0.1}]
    plain = plain_adamw(
        [*outer, {"params": [layer["up"].bias, layer["norm"].weight]}], lr=1e-3, weight_decay=0.0
    )
    theirs = torch.optim.Muon(inner, lr=RATE, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        give_gradients(model, step)
        give_gradients(twin, step)
        optimizer.step()
        plain.step()
        theirs.step()
    assert parameter_digest(model) == parameter_digest(twin)
    kinds = {name.removeprefix("model.layers.0.") for name in optimizer.tensors() if "up" in name}
    assert kinds == {"up.weight.momentum_buffer", *(f"up.bias.{k}" for k in (*MOMENTS, "step"))}


MOMENTS = ("exp_avg", "exp_avg_sq")


def test_muon_refuses_weights_of_all_experts_in_one():
    model = layered_model()
    model["model"]["layers"][0].register_parameter("experts", nn.Parameter(torch.ones(2, 64, 64)))
    with pytest.raises(ValueError, match=r"layers.0.experts is \[2, 64, 64\].*use adamw"):
        optimizer_of(model, name="muon")


EIGHT_BIT = pytest.param("adamw_8bit", marks=pytest.mark.thorough)  # bitsandbytes takes seconds


@pytest.mark.parametrize("name", ["muon", EIGHT_BIT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_optimizers_are_restored_bit_for_bit(name, dtype, tmp_path):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    given = {"name": name, "schedule": "linear", "min_lr_ratio": 0.1, "weight_decay": 0.1}

    def run(model, optimizer, steps):
        for step in steps:
            give_gradients(model, step)
            optimizer.step()
        return parameter_digest(model)

    whole, model = layered_model(dtype), layered_model(dtype)
    expected = run(whole, optimizer_of(whole, **given), range(6))
    first = optimizer_of(model, **given)
    run(model, first, range(3))
    save_file(first.tensors(), tmp_path / "o.safetensors")
    saved = load_file(tmp_path / "o.safetensors")
    if name == "adamw_8bit":
        assert saved["lm_head.weight.state1"].dtype == torch.uint8
    for moments in (saved, {k: torch.zeros_like(v) for k, v in saved.items() if "step" not in k}):
        again = layered_model(dtype)
        again.load_state_dict(model.state_dict())
        second = optimizer_of(again, **given)
        second.load(saved | moments, first.schedule_state())
        found = run(again, second, range(3, 6))
        assert (found == expected) == (moments is saved)
