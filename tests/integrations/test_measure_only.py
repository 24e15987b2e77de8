"""`attach(trainer, measure_only=True)`: the drift of a trainer that nothing was patched in."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

from types import SimpleNamespace

import torch
from trl import RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import extract_logprobs
from trl.trainer import grpo_trainer, rloo_trainer

from rl_consistency.models.modules import CanonicalModule
from tests.integrations.trainers import logged, sft

KINDS = {"GRPO": {}, "RLOO": {"config": RLOOConfig, "trainer": RLOOTrainer, "beta": 0.0}}


@pytest.fixture
def watched(make, attach):
    """A trainer that was measured, and its drift; the run is the one of a trainer left alone."""

    def train(**options):
        stock = make(**options)
        stock.train()
        trainer = make(**options)  # seeds what the run before has drawn from
        backend = dict(vars(trainer.vllm_generation)) if trainer.use_vllm else {}
        with attach(trainer, measure_only=True) as attachment:
            trainer.train()
        drift = attachment.drift
        assert not isinstance(trainer.model, CanonicalModule)
        assert sum(logged(trainer, "consistency/mismatched_tokens")) == drift.mismatched_tokens
        assert sum(logged(trainer, "consistency/tokens")) == drift.tokens
        assert not logged(trainer, "consistency/uncompared_tokens")
        assert logged(trainer, "loss") == logged(stock, "loss")
        weights = (each.model.parameters() for each in (stock, trainer))
        assert all(map(torch.equal, *weights))
        assert not backend or vars(trainer.vllm_generation) == backend
        return drift

    return train


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_stock_tokens_differ_by_rounding_and_the_run_is_stock_s(kind, watched):
    """Negative control of every 0 elsewhere: the same trainer without the patch."""
    drift = watched(**kind)
    assert drift.mismatched_tokens > drift.tokens / 10 and 0 < drift.max_abs_diff < 1e-4


def test_arguments_that_the_patch_refuses_can_be_measured(run):
    trainer, attachment = run(bf16=True, repetition_penalty=1.1, attached={"measure_only": True})
    assert attachment.drift.max_abs_diff > 1e-3
    assert not logged(trainer, "consistency/uncompared_tokens")


def test_detach_gives_back_generate_and_forward(attach, make):
    trainer = make()
    found, own = dict(vars(trainer)), dict(vars(trainer.model))
    attach(trainer, measure_only=True).detach()
    assert vars(trainer) == found and vars(trainer.model) == own


def test_what_cannot_be_measured_is_refused(attach, make):
    with pytest.raises(TypeError, match="a SFTTrainer does not generate"):
        attach(make(sft), measure_only=True)
    trainer = make()
    with pytest.raises(TypeError, match="measure_only=True leaves generation as it is"):
        attach(trainer, measure_only=True, num_kv_blocks=9)
    trainer.args.use_transformers_continuous_batching = True
    with pytest.raises(ValueError, match="use_transformers_continuous_batching=True; .*set it to"):
        attach(trainer, measure_only=True)
    trainer.args.use_transformers_continuous_batching, trainer.rollout_func = False, print
    with pytest.raises(ValueError, match="rollout_func=.*leave it out"):
        attach(trainer, measure_only=True)


class VLLM:
    """TRL's backend with the model itself for an engine, a token at a time."""

    warmer = 1.0

    def __init__(self, *, model, temperature, logprobs, max_completion_length, **options):
        self.model, self.temperature, self.logprobs = model, temperature, logprobs
        self.most, self.random = max_completion_length, torch.Generator().manual_seed(0)

    def sync_weights(self):
        """It is the trainer's model."""

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        requests = [SimpleNamespace(outputs=[self.completion(prompt)]) for prompt in prompts]
        tokens = [request.outputs[0].token_ids for request in requests]
        return prompts, tokens, *extract_logprobs(requests)

    def completion(self, prompt):
        tokens, logprobs = [], []
        for _ in range(self.most):
            logits = self.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            row = (logits / (self.temperature * self.warmer)).log_softmax(-1)
            tokens.append(int(row.exp().multinomial(1, generator=self.random)))
            ranked = row.argsort(descending=True).tolist()
            given = {*ranked[: self.logprobs or 0], tokens[-1]}
            logprobs.append(
                {t: SimpleNamespace(logprob=row[t].item(), rank=ranked.index(t)) for t in given}
            )
        asked = self.logprobs is not None
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs if asked else None)


@pytest.fixture
def vllm(monkeypatch):
    """TRL's trainers build and call it as they do vLLM, which is not installed here."""
    for module in (grpo_trainer, rloo_trainer):
        monkeypatch.setattr(module, "VLLMGeneration", VLLM)
    return VLLM


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_drift_of_vllm_is_measured_and_the_run_is_stock_s(kind, watched, vllm):
    options = {"use_vllm": True, "temperature": 0.7, "gradient_accumulation_steps": 2}
    drift = watched(**kind, **options)
    assert drift.mismatched_tokens > 0 and drift.max_abs_diff < 1e-4
    assert drift.tokens == 2 * 2 * 4 * 6


@pytest.mark.parametrize("asked", [0, 3])
def test_a_vllm_at_another_temperature_is_seen(asked, attach, vllm, monkeypatch, make):
    """Negative control, with the logprobs of other tokens beside the sampled one's too."""
    for warmer in (1.0, 1.1):
        monkeypatch.setattr(vllm, "warmer", warmer)
        trainer = make(use_vllm=True, max_steps=1)
        trainer.vllm_generation.logprobs = asked
        attachment = attach(trainer, measure_only=True)
        trainer.train()
        assert (attachment.drift.max_abs_diff > 1e-3) == (warmer != 1)
