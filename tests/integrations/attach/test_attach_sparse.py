"""An unmodified GRPOTrainer around mixtures of experts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.integrations import generation
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.rollout.completion import routing_of
from tests.integrations.trainers import logged, sft

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "initializer_range": 0.3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}


def made(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES | changes))


def test_no_token_differs_on_a_first_update(run):
    trainer, attachment = run(model=made(), router_aux_loss_coef=0.0)
    compared = logged(trainer, "consistency/tokens")
    assert sum(compared) == attachment.drift.tokens > 0
    assert logged(trainer, "consistency/mismatched_tokens") == [0] * len(compared)
    assert logged(trainer, "consistency/rerouted_tokens") == [0] * len(compared)
    assert attachment.drift.rerouted_tokens == 0


def test_a_token_that_met_other_experts_is_counted_and_told(tmp_path, attach, monkeypatch, make):
    """Negative control: equal logprobs alone do not pass."""

    def rerouted(completions):
        first, *others = routing_of(completions)
        return [first + 1, *others]

    monkeypatch.setattr(generation, "routing_of", rerouted)
    trainer = make(model=made(), router_aux_loss_coef=0.0)
    attachment = attach(trainer)
    with pytest.warns(UserWarning, match="0 of .* tokens have other logprobs .* met other experts"):
        trainer.train()
    assert attachment.drift.mismatched_tokens == 0 < attachment.drift.rerouted_tokens
    assert not attachment.drift.passed
    assert not (tmp_path / "replay").exists()


def test_a_stock_trainer_is_measured_without_its_experts(run):
    options = {"model": made(), "router_aux_loss_coef": 0.0}
    _, attachment = run(**options, attached={"measure_only": True})
    assert attachment.drift.tokens > 0 and attachment.drift.rerouted_tokens is None


def test_the_auxiliary_loss_over_the_batch_is_refused_by_name(attach, make):
    """TRL adds it to every mixture of experts, unless it is told not to."""
    with pytest.raises(ValueError, match="aux_loss_enabled=True; .* no sum over sequences"):
        attach(make(model=made()))
    model = made(output_router_logits=True)
    trainer = make(model=model, router_aux_loss_coef=0.0)
    with pytest.raises(UnsupportedModelError, match="output_router_logits=True, .* no sum over"):
        attach(trainer)


def test_a_sparse_model_is_fine_tuned_without_the_auxiliary_loss(run):
    """TRL writes the coefficient into the config, beside the model's own copy of it."""
    trainer, _ = run(sft, model=made(), router_aux_loss_coef=0.0)
    assert logged(trainer, "loss")
