"""`attach(trainer, check_gradients_every=...)`: the gradients of the trainer's own loss."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from trl import RLOOConfig, RLOOTrainer

from tests.integrations.trainers import grpo, logged, plain, sft

KEY = "consistency/gradient_check"
TRAINERS = {
    "GRPO": (grpo, {"gradient_accumulation_steps": 2, "beta": 0.1}),
    "GRPO, top-p": (grpo, {"top_p": 0.9, "gradient_checkpointing": True}),
    "RLOO": (grpo, {"config": RLOOConfig, "trainer": RLOOTrainer}),
    "SFT": (sft, {"padding_free": True, "max_length": None}),
    "Trainer": (plain, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize(("build", "options"), TRAINERS.values(), ids=TRAINERS)
def test_gradients_pass_and_the_weights_are_those_without_checks(
    build, options, directory, tmp_path, attach
):
    ends = []
    for checks in ({}, {"check_gradients_every": 2}):
        trainer = build(directory, tmp_path, max_steps=3, **options)
        attachment = attach(trainer, **checks)
        trainer.train()
        ends.append([parameter.detach() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *ends))
    assert logged(trainer, f"{KEY}/checks") == [1, 1]
    assert logged(trainer, f"{KEY}/regroupings") == [5, 5]
    assert logged(trainer, f"{KEY}/mismatched_elements") == [0, 0]
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert logged(trainer, f"{KEY}/elements") == [5 * elements] * 2
    assert min(logged(trainer, "time/gradient_check_seconds")) > 0
    assert attachment.gradients.passed and attachment.gradients.elements == elements
