"""An unmodified GRPOTrainer with `attach`: generation and training give the same bits."""

import math

import pytest
import torch

from rl_consistency.integrations import attach as attaching
from rl_consistency.integrations import rollout_drift
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.models.scoring.token_logprobs import label_logprobs
from rl_consistency.rollout.device.model_runner import ModelRunner
from tests.integrations.trainers import grpo, logged, quick_at, sft

VARIANTS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "KL reference": {"beta": 0.1},
    "sampled at 0.7": {"temperature": 0.7},
    "top-p": {"top_p": 0.9},
    "generation within accumulation": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
}


@pytest.mark.parametrize("options", quick_at("plain", VARIANTS))
def test_no_token_differs_on_a_first_update(options, attach, make):
    trainer = make(**options)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    attachment = attach(trainer)
    trainer.train()
    compared = logged(trainer, "consistency/tokens")
    assert sum(compared) == attachment.drift.tokens > 0
    assert logged(trainer, "consistency/mismatched_tokens") == [0] * len(compared)
    assert not logged(trainer, "consistency/uncompared_tokens")
    assert not logged(trainer, "off_policy/tokens")
    moved = zip(before, trainer.model.parameters(), strict=True)
    assert any(not torch.equal(was, now) for was, now in moved)


def test_checkpointing_does_not_keep_rollouts_from_graphs(monkeypatch, run):
    """TRL trains with it by default and enables it again after every rollout."""
    states, begin = [], ModelRunner.begin

    def noted(runner, *arguments):
        begin(runner, *arguments)
        states.append(runner._captured_from[1][1])

    monkeypatch.setattr(ModelRunner, "begin", noted)
    run(max_steps=3, gradient_checkpointing=True)
    assert len(states) == 3 and states[0] == states[1] == states[2] and not states[0].hooked


@pytest.mark.parametrize(
    "options", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=lambda o: next(iter(o))
)
def test_later_updates_on_a_rollout_are_logged_under_another_name(options, run):
    trainer, attachment = run(max_steps=4, **options)
    for entry in trainer.state.log_history[:4]:
        first = entry["step"] in (1, 3)
        assert ("consistency/tokens" in entry) == first
        assert ("off_policy/tokens" in entry) == (not first)
    assert attachment.drift.passed
    assert min(logged(trainer, "off_policy/mismatched_tokens")) > 0


def test_a_batch_without_a_token_to_train_on_has_a_gradient_of_zero(run):
    trainer, attachment = run(mask_truncated_completions=True, max_completion_length=1)
    assert logged(trainer, "completions/clipped_ratio") == [1.0, 1.0]
    assert logged(trainer, "grad_norm") == [0.0, 0.0] and attachment.drift is None


def test_the_scores_are_those_of_trl_within_rounding(attach, make):
    trainer = make(temperature=0.7)
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, *[1] * 7], [*[1] * 8, 0]])

    def scores():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 5, compute_entropy=True
        )[:2]

    stock = scores()
    with attach(trainer):
        ours = scores()
    for left, right in zip(stock, ours, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    assert not any(map(torch.equal, stock, ours))


def test_detach_gives_back_what_was_found(attach, make):
    trainer = make(beta=0.1)
    models = (trainer.model, trainer.ref_model)
    found = dict(vars(trainer))
    forwards = [model.forward.__func__ for model in models]
    classes = [[type(module) for module in model.modules()] for model in models]
    learns = [[p.requires_grad for p in model.parameters()] for model in models]
    attachment = attach(trainer)
    assert isinstance(trainer.ref_model, CanonicalModule) and trainer.use_vllm
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    attachment.detach()
    attachment.detach()
    assert vars(trainer) == found
    assert [model.forward.__func__ for model in models] == forwards
    assert [[type(module) for module in model.modules()] for model in models] == classes
    assert [[p.requires_grad for p in model.parameters()] for model in models] == learns
    trainer.train()
    assert not logged(trainer, "consistency/tokens") and logged(trainer, "loss")


def test_evaluation_leaves_the_rollout_that_is_trained_on(run):
    trainer, _ = run(
        steps_per_generation=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4
    )
    assert logged(trainer, "eval_reward") and logged(trainer, "off_policy/tokens")
    assert logged(trainer, "consistency/mismatched_tokens") == [0]
    assert not logged(trainer, "consistency/uncompared_tokens")


# Negative controls: each plants a fault that the logged drift has to show.


def test_a_last_bit_of_one_token_is_counted(monkeypatch, run):
    def nudged(*args, **options):
        scores = label_logprobs(*args, **options)
        row = scores.mask.any(1).nonzero()[0]
        place = row, scores.mask[row].int().argmax(1)
        with torch.no_grad():
            scores.logprobs[place] = torch.nextafter(
                scores.logprobs[place], torch.tensor(-math.inf)
            )
        return scores

    monkeypatch.setattr(attaching, "label_logprobs", nudged)
    trainer, _ = run()
    assert logged(trainer, "consistency/mismatched_tokens") == [1, 1]
    assert logged(trainer, "consistency/ulp/max") == [1, 1]


def test_an_engine_at_another_temperature_is_seen(monkeypatch, run):
    params = attaching.SamplingParams

    class Warmer(attaching.EngineGeneration):
        def __init__(self, trainer, policy, sampling, *others):
            warmer = params(temperature=0.9, max_tokens=sampling.max_tokens)
            super().__init__(trainer, policy, warmer, *others)

    monkeypatch.setattr(attaching, "EngineGeneration", Warmer)
    trainer, _ = run()
    assert min(logged(trainer, "consistency/mismatch_fraction")) > 0.5


@pytest.mark.parametrize("build", [grpo, sft])
def test_mutant_trl_s_fused_head_left_in_place(build, monkeypatch, attach, make):
    """TRL's head would answer every call in training, over the patched layers."""
    patched = attaching.Attachment._patch

    def left(attachment, model, *others):
        fused = model.forward
        patched(attachment, model, *others)
        model.forward = fused

    monkeypatch.setattr(attaching.Attachment, "_patch", left)
    trainer = make(build)
    attach(trainer)
    message = r"forward replaced .* by trl\..*add_fused_lm_head.*attach"
    with pytest.raises(UnsupportedModelError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_mutant_a_later_update_that_is_reported_as_the_first(monkeypatch, run):
    monkeypatch.setattr(rollout_drift, "LATER", rollout_drift.FIRST)
    trainer, _ = run(num_iterations=2)
    first, second = logged(trainer, "consistency/mismatched_tokens")
    assert first == 0 < second


def test_tokens_that_no_rollout_sampled_are_counted(monkeypatch, run):
    monkeypatch.setattr(rollout_drift.RolloutDrift, "sampled", lambda *_: None)
    trainer, _ = run()
    assert all(count > 0 for count in logged(trainer, "consistency/uncompared_tokens"))
    assert len(logged(trainer, "consistency/uncompared_tokens")) == 2
