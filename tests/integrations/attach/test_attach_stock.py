"""`attachment.stock()`, and `generate` of others, in a trainer that is attached."""

import logging

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from transformers import TrainerCallback

from rl_consistency.models.families import UnsupportedModelError
from tests.integrations.trainers import loaded, logged

IDS = torch.tensor([[49, 43, 50, 61]])


class Samples(TrainerCallback):
    """Logs a sample, as people do."""

    drawn: list

    def on_step_end(self, args, state, control, model=None, **_):
        self.drawn.append(model.generate(IDS, max_new_tokens=3, do_sample=False))


def test_the_models_are_stock_inside_and_patched_after(directory, attach, make):
    trainer = make(beta=0.1)
    attachment = attach(trainer)
    right = loaded(directory)(IDS).logits
    fused = {"labels": IDS, "fused_lm_head": True}
    ours = trainer.model(IDS, torch.ones_like(IDS), **fused).log_probs
    with attachment.stock() as model, attachment.stock():
        assert model is trainer.model and torch.equal(model(IDS).logits, right)
        assert model(input_ids=IDS, **fused).log_probs.shape == (1, 3)
        assert type(trainer.ref_model).__module__.startswith("transformers.")
        with pytest.raises(ValueError, match=r"not patched inside session.stock\(\)"):
            trainer.vllm_generation.generate([[49]], None, 1)
    assert torch.equal(trainer.model(IDS, torch.ones_like(IDS), **fused).log_probs, ours)
    attachment.detach()
    with attachment.stock() as model:
        assert torch.equal(model(IDS).logits, right)


def test_detach_waits_for_the_end_of_stock(attach, make):
    """Inside it would take TRL's forward off the model."""
    attachment = attach(trainer := make())
    refused = pytest.raises(ValueError, match=r"detach\(\) inside attachment.stock\(\)")
    with attachment.stock(), refused:
        attachment.detach()
    attachment.detach()
    fused = {"labels": IDS, "fused_lm_head": True}
    assert trainer.model(input_ids=IDS, **fused).log_probs.shape == (1, 3)


def test_a_prompt_beyond_the_context_names_arguments_of_trl(attach, make):
    trainer = make()
    attach(trainer)
    context = trainer.model.config.max_position_embeddings
    with pytest.raises(ValueError, match="max_completion_length=.* exceed the model's context"):
        trainer.vllm_generation.generate([[49] * context], None, 1)


def test_what_was_changed_inside_is_found_when_the_block_ends(attach, make):
    attachment = attach(make())
    with pytest.raises(UnsupportedModelError), attachment.stock() as model:
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def test_generate_of_a_callback_is_stock_and_changes_no_run(directory, caplog, run):
    Samples.drawn = []
    with caplog.at_level(logging.WARNING, "rl_consistency"):
        trainer, attachment = run(callbacks=[Samples()])
    assert logged(trainer, "consistency/mismatched_tokens") == [0, 0]
    assert caplog.text.count("model.generate() runs stock, in attachment.stock()") == 1
    attachment.detach()
    after = trainer.model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert len(Samples.drawn) == 2 and torch.equal(Samples.drawn[1], after)
    plain, _ = run()
    pairs = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
