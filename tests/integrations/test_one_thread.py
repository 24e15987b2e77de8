"""Backward passes of an attached trainer run in its own thread; autograd's threads come back."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch

from rl_consistency.integrations.attach import _in_one_thread as in_one_thread
from tests.integrations.trainers import grpo, plain


def enabled():
    return torch._C._is_multithreading_enabled()


def test_a_backward_pass_that_breaks_off_gives_them_back():
    with pytest.raises(ZeroDivisionError):
        in_one_thread(lambda: 1 / 0)()
    assert enabled()


@pytest.mark.parametrize("trainer_of", [plain, grpo])
def test_an_attached_trainer_goes_backward_in_one_thread(trainer_of, directory, tmp_path, attach):
    seen, trainer = [], trainer_of(directory, tmp_path, max_steps=1)
    found = vars(trainer.accelerator).get("backward")
    attachment = attach(trainer)
    weight = trainer.model.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(enabled()))
    trainer.train()
    attachment.detach()
    assert seen and not any(seen) and enabled()
    assert vars(trainer.accelerator).get("backward") is found


def test_measuring_alone_leaves_autograds_threads(attach, make):
    seen, trainer = [], make(max_steps=1)
    attach(trainer, measure_only=True)
    trainer.model.lm_head.weight.register_hook(lambda gradient: seen.append(enabled()))
    trainer.train()
    assert seen and all(seen)
