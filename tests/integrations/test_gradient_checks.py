"""`attach(trainer, check_gradients_every=...)`: the gradients of the trainer's own loss."""

import math
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from trl import RLOOConfig, RLOOTrainer

from rl_consistency.integrations import gradient_checks
from rl_consistency.integrations.attach import LabelAnswer
from rl_consistency.integrations.gradient_checks import GradientChecks
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.gradients import REGROUPINGS, check_gradients
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.integrations.trainers import distinct_tokens, grpo, loaded, logged, plain, quick_at, sft

KEY = "consistency/gradient_check"
TRAINERS = {
    "GRPO": (grpo, {"gradient_accumulation_steps": 2, "beta": 0.1}),
    "GRPO, top-p": (grpo, {"top_p": 0.9, "gradient_checkpointing": True}),
    "RLOO": (grpo, {"config": RLOOConfig, "trainer": RLOOTrainer}),
    "SFT": (sft, {"padding_free": True, "max_length": None}),
    "Trainer": (plain, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize(("build", "options"), quick_at("GRPO", TRAINERS))
def test_gradients_pass_and_the_weights_are_those_without_checks(build, options, attach, make):
    ends = []
    for checks in ({}, {"check_gradients_every": 2, "check_gradients_seconds": math.inf}):
        trainer = make(build, max_steps=3, **options)
        attachment = attach(trainer, **checks)
        trainer.train()
        ends.append([parameter.detach() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *ends))
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    found = [e for e in trainer.state.log_history if f"{KEY}/checks" in e]
    assert [entry["step"] for entry in found] == [1, 3]
    for entry in found:
        assert entry["time/gradient_check_seconds"] > 0
        assert {key.removeprefix(f"{KEY}/"): n for key, n in entry.items() if KEY in key} == {
            "checks": 1,
            "without_gradient": 0,
            "regroupings": len(REGROUPINGS),
            "elements": len(REGROUPINGS) * elements,
            "mismatched_elements": 0,
        }
    assert attachment.gradients.passed and attachment.gradients.elements == elements


def padded():
    """Rows of unequal lengths, of which the second has no label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (3, 9), generator=generator)
    mask = torch.tensor([[0, 0, *[1] * 7], [*[1] * 8, 0], [1] * 9])
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = labels[1] = -100
    labels[2, 5] = -100  # what a tool wrote
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed():
    """One row of two sequences."""
    ids = torch.arange(12).unsqueeze(0)
    positions = torch.tensor([[*range(5), *range(7)]])
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


@pytest.mark.parametrize("call", [padded(), packed()], ids=["padded", "packed"])
def test_what_is_checked_is_the_gradient_of_the_loss(call, directory, monkeypatch):
    """Of logprobs and of entropy: its bytes are those that the loss left."""
    model = loaded(directory).train()
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=0), accelerator=SimpleNamespace(num_processes=1)
    )
    sampling = SamplingParams(temperature=0.7)
    checks = GradientChecks(trainer, model, sampling, every=1, seconds=None)
    monkeypatch.setattr(
        gradient_checks, "check_gradients", partial(check_gradients, compare_present=True)
    )
    with patch(model):
        model.answer = LabelAnswer(sampling, observers=[checks.observe])
        out = model(**call, fused_lm_head=True)
        (out.log_probs.exp().sum() - 0.1 * (out.entropy**2).sum()).backward()
        checks.on_step_end(None, SimpleNamespace(global_step=1), None)
    assert checks.last.passed
    assert checks.last.results[0].name == "as trained"
    assert set(checks.last.results[0].differing) == set(dict(model.named_parameters()))


def test_sequences_are_drawn_anew_and_those_with_a_gradient_first(directory, monkeypatch):
    """Six sequences of one length, told apart by their first token; the third has no gradient."""
    model = loaded(directory).train()
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=0), accelerator=SimpleNamespace(num_processes=1)
    )
    ids = torch.tensor([[row, 7, 8, 9] for row in range(6)])
    checks = GradientChecks(trainer, model, None, every=1, seconds=None)
    drawn = []

    def recorded(policy, sequences, **options):
        drawn.append([sequence[0] for sequence in sequences])
        return check_gradients(policy, sequences, **options)

    monkeypatch.setattr(gradient_checks, "check_gradients", recorded)
    with patch(model):
        model.answer = LabelAnswer(observers=[checks.observe])
        for step in range(12):
            trainer.state.global_step = step
            out = model(ids, torch.ones_like(ids), labels=ids, fused_lm_head=True)
            (out.log_probs.sum(1) * torch.tensor([1.0, 1, 0, 1, 1, 1])).sum().backward()
            checks.on_step_end(None, SimpleNamespace(global_step=step + 1), None)
            checks.on_step_begin(None, None, None)
    assert all(len(found) == 4 and found == sorted(found) and 2 not in found for found in drawn)
    assert {row for found in drawn for row in found} == {0, 1, 3, 4, 5}


def test_a_gradient_that_depends_on_the_cut_stops_the_run(attach, monkeypatch, make):
    """Negative control: with stock matrix products in the check."""

    def stock(*args, **options):
        with strict(except_={"linear"}):
            return check_gradients(*args, **options)

    monkeypatch.setattr(gradient_checks, "check_gradients", stock)
    trainer = make()
    attachment = attach(trainer, check_gradients_every=1)
    with pytest.raises(ConsistencyError) as error:
        trainer.train()
    report = attachment.gradients
    assert f"first in {report.first_parameter}. Run" in str(error.value)
    assert str(error.value).startswith("step 1, process 0: gradients depend on how the batch was")
    found = error.value.metrics[f"{KEY}/mismatched_elements"]
    assert found == sum(sum(result.differing.values()) for result in report.results) > 0


def test_a_step_whose_rewards_are_equal_is_counted_and_not_checked(attach, make):
    calls = []

    def equal_at_first(completions, **columns):
        calls.append(1)
        return distinct_tokens(completions) if len(calls) > 1 else [1.0] * len(completions)

    trainer = make()
    trainer.reward_funcs = [equal_at_first]
    attach(trainer, check_gradients_every=1)
    trainer.train()
    assert logged(trainer, f"{KEY}/without_gradient") == [1, 0]
    assert logged(trainer, f"{KEY}/checks") == [0, 1]


def zeros(seen, name, gradient):
    if gradient is not None:
        seen.cotangents[name] = torch.zeros_like(gradient)


@pytest.mark.parametrize("seen", [False, True])
def test_mutant_a_cotangent_of_zeros_fails(seen, attach, monkeypatch, make):
    """`seen`: as one whose parameters alone have no gradient, which shows when it is checked."""
    monkeypatch.setattr(gradient_checks._MicroBatch, "keep", zeros)
    if seen:
        monkeypatch.setattr(gradient_checks._MicroBatch, "has_gradient", lambda seen: True)
    trainer = make()
    attach(trainer, check_gradients_every=1)
    with pytest.raises(ConsistencyError, match=r"no gradient was checked.*zero at every token"):
        trainer.train()
    assert logged(trainer, f"{KEY}/checks") == logged(trainer, f"{KEY}/regroupings") == [0, 0]
    assert logged(trainer, f"{KEY}/without_gradient") == [1, 1]


def test_a_step_without_a_micro_batch_or_a_cotangent_fails(attach, monkeypatch, make):
    trainer = make()
    attach(trainer, check_gradients_every=1)
    trainer.model.answer.observers = []
    with pytest.raises(ConsistencyError, match="step 1, process 0: no micro-batch of the step"):
        trainer.train()
    monkeypatch.setattr(gradient_checks._MicroBatch, "keep", lambda *_: None)
    trainer = make()
    attach(trainer, check_gradients_every=1)
    with pytest.raises(ConsistencyError, match="the loss does not depend on what"):
        trainer.train()


@pytest.mark.parametrize("options", [{}, {"check_gradients_seconds": 1e-9}])
def test_without_a_budget_the_regroupings_take_turns(options, attach, monkeypatch, make):
    names = []

    def recorded(*args, **options):
        report = check_gradients(*args, **options)
        names.extend(result.name for result in report.results)
        return report

    monkeypatch.setattr(gradient_checks, "check_gradients", recorded)
    trainer = make(sft, max_steps=6)
    attach(trainer, check_gradients_every=1, **options)
    trainer.train()
    assert logged(trainer, f"{KEY}/regroupings") == [1] * 6
    expected = [regrouping.name for regrouping in REGROUPINGS]
    assert names == [*expected, expected[0]]


def test_options_that_no_check_can_have_are_refused(attach, make):
    trainer = make()
    for every in (-1, 0.5, True, "10"):
        with pytest.raises(ValueError, match=f"check_gradients_every={every!r}; give a number"):
            attach(trainer, check_gradients_every=every)
    for seconds in (0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="check_gradients_seconds=.*; give seconds above 0"):
            attach(trainer, check_gradients_every=1, check_gradients_seconds=seconds)
    with pytest.raises(ValueError, match="check_gradients_every=0 never makes"):
        attach(trainer, check_gradients_seconds=1.0)
    with pytest.raises(TypeError, match="measure_only=True leaves generation as it is"):
        attach(trainer, measure_only=True, check_gradients_every=1)


def test_detach_takes_the_checks_off(attach, make):
    trainer = make(sft)
    found = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    attachment = attach(trainer, check_gradients_every=1)
    assert attachment.gradients is None
    assert trainer.callback_handler.callbacks != found[1]
    attachment.detach()
    assert (vars(trainer), trainer.callback_handler.callbacks) == found
