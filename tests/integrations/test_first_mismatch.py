"""`attach` saves the first mismatch and names the op where it begins; training goes on."""

import errno
import json
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from transformers import TrainerCallback

from rl_consistency.integrations import rollout_drift
from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.models import modules
from rl_consistency.models.modules import CanonicalLinear
from rl_consistency.parity import drift_monitor, replay
from rl_consistency.parity import localize as localizing
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.localize import localize_bundle
from rl_consistency.parity.replay import LOCALIZATION, TEXTS, load_replay_bundle
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.substitution import attribute
from tests.integrations.test_rollout_drift import end_step, observe, sample
from tests.integrations.trainers import grpo, logged


def worse_decode(q, layout, index, *, run=modules.attention_paged, **named):
    """Decoding attention that is wrong in the second layer."""
    out, lse = run(q, layout, index, **named)
    return (out * (1 + 2**-20) if index == 1 else out), lse


def worse_training(down, *operands, run=CanonicalLinear.after_glu):
    """A down projection that is wrong where gradients are wanted."""
    return run(down, *operands) * (1 + 2**-20)


FAULTS = {
    "attention of layer 1 (model.layers.1.self_attn)": (modules, "attention_paged", worse_decode),
    "linear of layer 0 (model.layers.0.mlp.down_proj)": (
        *(CanonicalLinear, "after_glu"),
        worse_training,
    ),
}


@contextmanager
def told():
    """What is said of mismatches inside the block."""
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    lines += [line for w in caught if "other logprobs in training" in (line := str(w.message))]


@pytest.fixture
def trained(directory, tmp_path, attach):
    """Two steps with decoding that is wrong: the trainer, and what it was told."""

    def train(*, options=None, callbacks=(), **attached):
        trainer = grpo(directory, tmp_path, **(options or {}))
        for callback in callbacks[:1]:
            trainer.add_callback(callback)
        attach(trainer, **attached)
        for callback in callbacks[1:]:
            trainer.add_callback(callback)
        with told() as lines, attribute(modules, "attention_paged", worse_decode):
            trainer.train()
        return trainer, lines

    return train


@pytest.mark.parametrize("first", FAULTS)
def test_the_first_mismatch_is_saved_and_names_the_planted_op(first, tmp_path, attach, make):
    trainer = make(temperature=0.7)
    attach(trainer)
    with told() as lines, attribute(*FAULTS[first]):
        trainer.train()
    assert min(logged(trainer, "consistency/mismatched_tokens")) > 0
    assert len(logged(trainer, "consistency/mismatched_tokens")) == 2
    (line,) = lines
    (path,) = (tmp_path / "replay").iterdir()
    assert f"differs first in: {first}, forward" in line and str(path) in line
    assert line.startswith("step 1, process 0: ") and "\n" not in line
    assert json.loads((path / LOCALIZATION).read_text())["between"] == ["rollout", "training"]
    bundle = load_replay_bundle(path)
    drift = logged(trainer, "consistency/mismatched_tokens")[0]
    assert bundle.drift().mismatched_tokens == drift
    assert bundle.config["weights"] == "after the step" and bundle.config["step"] == 1
    assert bundle.config["rollout"]["sampling"]["temperature"] == 0.7
    for token, text in json.loads((path / TEXTS).read_text()).items():
        assert text == trainer.processing_class.decode([int(token)])


def test_a_bundle_can_be_localized_again_with_the_weights_after_its_step(trained, tmp_path):
    trainer, _ = trained(options={"max_steps": 1})
    (path,) = (tmp_path / "replay").iterdir()
    bundle = load_replay_bundle(path)
    with attribute(modules, "attention_paged", worse_decode):
        found = localize_bundle(trainer.model, bundle, ablation=False)
    assert str(found.first).startswith("attention of layer 1")
    assert localize_bundle(trainer.model, bundle, ablation=False).equal


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}],
    ids=["plain", "generation within accumulation"],
)
def test_a_run_that_localized_ends_as_one_that_could_not(trained, options):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("no room")

    ends, lines = [], []
    for plant in (nullcontext(), attribute(localizing, "localize", no_room)):
        with plant:
            trainer, (line,) = trained(options=options)
        lines.append(line)
        ends.append((parameter_digest(trainer.model), logged(trainer, "loss")))
    assert "attention of layer 1" in lines[0] and "not localized (no room)" in lines[1]
    assert ends[0] == ends[1]


class Held(TrainerCallback):
    """Leaves a gradient on each parameter at the end of a step, or looks for it and removes it."""

    def __init__(self, found=None):
        self.before = found
        self.state = None
        self.looked = 0

    def on_step_end(self, args, state, control, model, **kwargs):
        if self.before is None:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.gradients = [parameter.grad for parameter in model.parameters()]
            self.state = torch.get_rng_state(), [m.training for m in model.modules()]
            return
        for parameter, kept in zip(model.parameters(), self.before.gradients, strict=True):
            assert parameter.grad is kept and bool((kept == 1).all())
            parameter.grad = None
        assert torch.equal(self.before.state[0], torch.get_rng_state())
        assert self.before.state[1] == [m.training for m in model.modules()]
        self.looked += 1


def test_gradients_random_state_and_mode_stay(trained):
    held = Held()
    looks = Held(held)
    _, lines = trained(callbacks=(held, looks))
    assert "attention of layer 1" in lines[0] and looks.looked == 2


def test_without_a_mismatch_nothing_is_saved_or_said(tmp_path, attach, make):
    trainer = make(num_iterations=2)
    attach(trainer)
    with told() as lines:
        trainer.train()
    assert logged(trainer, "off_policy/mismatched_tokens")[0] > 0, "later updates differ by design"
    assert not lines and not (tmp_path / "replay").exists()


def test_what_is_only_measured_is_not_localized(trained, tmp_path):
    trainer, lines = trained(measure_only=True)
    assert min(logged(trainer, "consistency/mismatched_tokens")) > 0
    assert not lines and not (tmp_path / "replay").exists()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((replay, "replace", full), "not saved for replay ([Errno 28] No space left on device)"),
        ((localizing, "write_whole", full), "not localized ([Errno 28] No space left on device)"),
        (
            (rollout_drift, "is_sharded", lambda _: True),
            "not saved for replay (the parameters are",
        ),
    ],
    ids=["no room for the bundle", "no room for what was found", "shards"],
)
def test_what_cannot_be_saved_or_localized_is_said_once_and_ends_nothing(fault, said, trained):
    with attribute(*fault):
        trainer, (line,) = trained()
    assert said in line and "attention of layer" not in line
    assert trainer.state.global_step == 2


def test_turns_are_saved_with_all_that_stands_before_them(tmp_path, monkeypatch):
    """A token that is not trained on counts as found again."""
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(num_processes=1, process_index=0),
        model=torch.nn.Linear(1, 1),
        args=SimpleNamespace(report_to=[], output_dir=str(tmp_path)),
        processing_class=SimpleNamespace(decode=str),
    )
    drift = RolloutDrift(trainer, SamplingParams())
    monkeypatch.setattr(drift_monitor, "localized", lambda *_: "")
    drift.sampled(*sample([7, 8], [3, 4], [-1.0, -2.0]))
    drift.sampled(*sample([7, 8, 3, 4, 9, 9], [5, 6], [-3.0, -4.0]))
    observe(drift, [7, 8, 3, 4, 9, 9, 5, 6], [0, 0, 1, 1, 0, 0, 0, 1], [-1.0, -2.0, -4.5])
    with pytest.warns(UserWarning, match="1 of 3 tokens have other logprobs"):
        end_step(drift)
    (path,) = (tmp_path / "replay").iterdir()
    bundle = load_replay_bundle(path)
    assert bundle.sequences == [[7, 8, 3, 4, 9, 9, 5, 6]] and bundle.prompt_lengths == [6]
    assert bundle.sequence_indices == [1]
    assert bundle.rollout_logprobs[0].tolist() == [-3.0, -4.0]
    assert bundle.training_logprobs[0].tolist() == [-3.0, -4.5]
