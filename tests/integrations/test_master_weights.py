"""16-bit weights in an attached trainer are updated through fp32 masters."""

import copy

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from rl_consistency.numerics.masters import MasterAdamW
from tests.integrations.trainers import grpo, loaded, logged, plain


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4).bfloat16()), nn.Parameter(torch.randn(5).bfloat16())]


def optimizer(weights, cls=MasterAdamW, **options):
    first, second = weights
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
    stock = torch.optim.AdamW(groups, lr=1e-4, betas=(0.8, 0.9), eps=1e-6)
    return cls(stock.param_groups)


def steps(optimizer, weights, count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
        optimizer.step()
        optimizer.zero_grad()


def test_the_weights_are_the_rounding_of_what_fp32_weights_would_be(weights):
    wide = [nn.Parameter(weight.detach().float()) for weight in weights]
    ours = optimizer(weights)
    steps(ours, weights)
    plain = optimizer(wide, torch.optim.AdamW)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for weight in wide:
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16().float()
        plain.step()
    for weight, right in zip(weights, wide, strict=True):
        assert torch.equal(weight, right.bfloat16()) and weight.grad is None
    assert [group["weight_decay"] for group in ours.param_groups] == [0.1, 0.0]


def test_updates_below_a_unit_in_the_last_place_add_up(weights):
    """Negative control beside it: AdamW on the weights themselves loses them."""
    ours, lossy = [nn.Parameter(torch.ones(4).bfloat16()) for _ in range(2)]
    for weight, cls in ((ours, MasterAdamW), (lossy, torch.optim.AdamW)):
        weight.grad = None
        made = cls([{"params": [weight], "lr": 1e-4, "weight_decay": 0.0}])
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            made.step()
    assert (ours < 1).all() and (lossy == 1).all()


def test_a_saved_state_continues_to_the_same_bits(weights):
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights]
    first = optimizer(weights)
    steps(first, weights)
    saved = copy.deepcopy(first.state_dict())
    for twin, weight in zip(twins, weights, strict=True):
        twin.data.copy_(weight)
    second = optimizer(twins)
    second.load_state_dict(saved)
    steps(first, weights, seed=1)
    steps(second, twins, seed=1)
    assert all(map(torch.equal, weights, twins))
    assert all(map(torch.equal, first._masters, second._masters))


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.fill_(0.5),
        lambda weight: setattr(weight, "data", torch.full_like(weight, 0.5)),
        lambda weight: torch.nn.utils.vector_to_parameters(torch.full((12,), 0.5), [weight]),
    ],
    ids=["data", "other data", "vector_to_parameters"],
)
def test_a_write_through_data_is_no_less_one(weights, write):
    """Versions of tensors say nothing of it."""
    ours = optimizer(weights)
    steps(ours, weights, count=1)
    write(weights[0])
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    ours.param_groups[0]["lr"] = 0.0
    ours.step()
    assert (weights[0] == 0.5).all()


def test_bfloat16_weights_train_without_a_differing_token(directory, run):
    trainer, _ = run(model=loaded(directory, dtype=torch.bfloat16))
    assert isinstance(trainer.optimizer.optimizer, MasterAdamW)
    assert logged(trainer, "consistency/mismatched_tokens") == [0, 0]
    for weight, master in zip(
        trainer.optimizer.optimizer._weights, trainer.optimizer.optimizer._masters, strict=True
    ):
        assert torch.equal(weight, master.bfloat16())
    assert any((m != m.bfloat16().float()).any() for m in trainer.optimizer.optimizer._masters)


def test_a_resumed_run_ends_with_the_same_weights(directory, tmp_path, attach):
    def run(folder, **options):
        trainer = grpo(
            directory,
            tmp_path / folder,
            model=loaded(directory, dtype=torch.bfloat16),
            save_strategy="steps",
            save_steps=2,
            max_steps=3,
        )
        attach(trainer)
        trainer.train(**options)
        return trainer

    whole = run("a")
    resumed = run("b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    assert logged(resumed, "consistency/mismatched_tokens") == [0, 0, 0]
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_an_optimizer_that_the_trainer_was_given_stays(directory, attach, make):
    trainer = make(model=loaded(directory, dtype=torch.bfloat16))
    own = trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    attach(trainer)
    assert trainer.optimizer is own


def test_another_optimizer_than_adamw_is_refused_for_16_bit_weights(directory, attach, make):
    trainer = make(model=loaded(directory, dtype=torch.bfloat16), optim="sgd")
    with pytest.raises(ValueError, match="optim='sgd' for a model in torch.bfloat16.*adamw_torch"):
        attach(trainer)
    assert trainer.optimizer is None and not trainer.use_vllm


def test_another_optimizer_than_asked_for_is_not_put_in(directory, attach, make):
    class Own(Trainer):
        def create_optimizer(self, *given):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

    trainer = make(plain, model=loaded(directory, dtype=torch.bfloat16), trainer=Own)
    with pytest.raises(
        ValueError, match="AdamW with fp32 masters in the place of the trainer's SGD"
    ):
        attach(trainer)
    assert trainer.optimizer is None


def test_the_state_of_an_adamw_over_the_weights_is_continued():
    weight = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
    stock = torch.optim.AdamW([weight], lr=1e-2)
    weight.grad = torch.ones_like(weight)
    stock.step()
    ours = MasterAdamW(torch.optim.AdamW([weight], lr=1e-2).param_groups)
    ours.load_state_dict(stock.state_dict())
    (master,) = ours.state_dict()["masters"]
    assert torch.equal(master, weight.detach().float())
    assert ours.state[ours.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.float32
    weight.grad = torch.ones_like(weight)
    ours.step()
    assert torch.equal(weight.detach(), ours.state_dict()["masters"][0].bfloat16())


def test_a_trainer_that_is_detached_in_training_goes_on(directory, attach, make):
    class Detach(TrainerCallback):
        def on_step_end(self, *_, **__):
            attachment.detach()

    trainer = make(plain, model=loaded(directory, dtype=torch.bfloat16))
    attachment = attach(trainer)
    trainer.add_callback(Detach())
    trainer.train()
    assert trainer.state.global_step == 2
