"""`attach(trainer, measure_only=True)`: the drift of a trainer that nothing was patched in."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from trl import RLOOConfig, RLOOTrainer

from rl_consistency.models.modules import CanonicalModule
from tests.integrations.trainers import grpo, logged, sft

KINDS = {"GRPO": {}, "RLOO": {"config": RLOOConfig, "trainer": RLOOTrainer, "beta": 0.0}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_stock_tokens_differ_by_rounding_and_the_run_is_stock_s(kind, directory, tmp_path, attach):
    """Negative control of every 0 elsewhere: the same trainer without the patch."""
    stock = grpo(directory, tmp_path, **kind)
    stock.train()
    watched = grpo(directory, tmp_path, **kind)
    attachment = attach(watched, measure_only=True)
    watched.train()
    assert not isinstance(watched.model, CanonicalModule)
    drift = attachment.drift
    assert drift.mismatched_tokens > drift.tokens / 10 and 0 < drift.max_abs_diff < 1e-4
    assert sum(logged(watched, "consistency/mismatched_tokens")) == drift.mismatched_tokens
    assert sum(logged(watched, "consistency/tokens")) == drift.tokens
    assert not logged(watched, "consistency/uncompared_tokens")
    assert logged(watched, "loss") == logged(stock, "loss")
    weights = (trainer.model.parameters() for trainer in (stock, watched))
    assert all(map(torch.equal, *weights))


def test_arguments_that_the_patch_refuses_can_be_measured(directory, tmp_path, attach):
    trainer = grpo(directory, tmp_path, bf16=True, repetition_penalty=1.1)
    attachment = attach(trainer, measure_only=True)
    trainer.train()
    assert attachment.drift.max_abs_diff > 1e-3
    assert not logged(trainer, "consistency/uncompared_tokens")


def test_detach_gives_back_generate_and_forward(directory, tmp_path, attach):
    trainer = grpo(directory, tmp_path)
    found, own = dict(vars(trainer)), dict(vars(trainer.model))
    attach(trainer, measure_only=True).detach()
    assert vars(trainer) == found and vars(trainer.model) == own


def test_what_cannot_be_measured_is_refused(directory, tmp_path, attach):
    with pytest.raises(TypeError, match="a SFTTrainer does not generate"):
        attach(sft(directory, tmp_path), measure_only=True)
    trainer = grpo(directory, tmp_path)
    with pytest.raises(TypeError, match="measure_only=True leaves generation as it is"):
        attach(trainer, measure_only=True, num_kv_blocks=9)
    trainer.args.use_vllm = True
    with pytest.raises(ValueError, match="use_vllm=True; set it to False"):
        attach(trainer, measure_only=True)
    trainer.args.use_vllm, trainer.rollout_func = False, print
    with pytest.raises(ValueError, match="leave out rollout_func"):
        attach(trainer, measure_only=True)
