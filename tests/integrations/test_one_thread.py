"""An attached trainer's backward passes run in its own thread, and autograd's threads come back."""

import pytest
import torch

from rl_consistency.integrations.one_thread import OneThread
from tests.integrations.trainers import grpo, plain


def enabled():
    return torch._C._is_multithreading_enabled()


def test_a_trainer_trains_in_one_thread_and_gives_autograd_its_own_back():
    callback = OneThread()
    assert enabled()
    for _ in range(2):
        callback.on_train_begin(None, None, None)
        assert not enabled()
        callback.on_train_end(None, None, None)
        assert enabled()


def test_what_was_off_before_stays_off():
    callback = OneThread()
    with torch.autograd.set_multithreading_enabled(False):
        callback.on_train_begin(None, None, None)
        callback.on_train_end(None, None, None)
        assert not enabled()
    assert enabled()


def test_a_run_that_breaks_off_gives_them_back_when_it_is_detached(directory, tmp_path, attach):
    seen, trainer = [], plain(directory, tmp_path)
    attachment = attach(trainer)

    def breaks_off(gradient):
        seen.append(enabled())
        return 1 / 0

    hook = trainer.model.lm_head.weight.register_hook(breaks_off)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    hook.remove()
    assert seen == [False] and not enabled()
    attachment.detach()
    assert enabled()


def test_measuring_alone_leaves_autograds_threads(directory, tmp_path, attach):
    seen, trainer = [], grpo(directory, tmp_path, max_steps=1)
    attach(trainer, measure_only=True)
    trainer.model.lm_head.weight.register_hook(lambda gradient: seen.append(enabled()))
    trainer.train()
    assert seen and all(seen)
