"""Each seam between vLLM and the plug-in, broken on purpose, is seen by the checks."""

import copy
from types import SimpleNamespace

import pytest
import torch

import rl_consistency as rlc
from tests.gpu.vllm.engines import engine_of
from tests.gpu.vllm.policies import Trainer, checkpoint, differing, random_prompts

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts("mutants", (40, 130, 300, 71))
THREE = random_prompts("three", (100, 100, 100))
"""They decode in a graph of eight, so that five rows are padding."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp("mutants") / "model")
    with engine_of(folder) as engine:
        yield SimpleNamespace(engine=engine, trainer=Trainer.of(folder))


def wrong(run, found, prompts=PROMPTS):
    return differing(found, run.trainer.scored(prompts, found))


def test_a_bound_in_the_place_of_a_length(run, monkeypatch):
    from rl_consistency.integrations.vllm.steps import Step

    real = Step.__init__

    def bounded(self, common, **options):
        common = copy.copy(common)
        common.seq_lens = common.seq_lens + 1
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + 1
        real(self, common, **options)

    assert wrong(run, run.engine.drawn(PROMPTS)) == 0
    run.engine.llm.reset_prefix_cache()
    with monkeypatch.context() as mutant:
        mutant.setattr(Step, "__init__", bounded)
        found = run.engine.drawn(PROMPTS)
    run.engine.llm.reset_prefix_cache()
    # A key that no step has written may hold anything, NaN too.
    scored = run.trainer.scored(PROMPTS, found)
    assert [logprobs for _, logprobs in found] != [logprobs for _, logprobs in scored]
    assert wrong(run, run.engine.drawn(PROMPTS)) == 0


def test_a_penalty_that_is_ignored(run, monkeypatch):
    from rl_consistency.integrations.vllm import requests

    penalty = {"presence_penalty": 1.5}
    with pytest.raises(ValueError, match="presence_penalty=1.5 is not covered by rl_consistency"):
        run.engine.drawn(PROMPTS[:1], **penalty)
    # Behind a front end that lets it through, the worker gives no logprobs.
    monkeypatch.setattr(requests, "require_covered", lambda request: None)
    with pytest.raises(ValueError, match="a logprob is no number"):
        differing(*[run.engine.drawn(PROMPTS[:1], **penalty)] * 2)
    # Without both it would be ignored, and nothing would be seen in the logprobs.
    monkeypatch.setattr(requests, "COVERED", requests.COVERED | penalty.keys())
    plain = run.engine.drawn(PROMPTS[:1])
    assert differing(run.engine.drawn(PROMPTS[:1], **penalty), plain) == 0


def test_a_seed_that_is_not_the_requests(run, monkeypatch):
    first = run.engine.drawn(PROMPTS)
    assert differing(first, run.trainer.completed(PROMPTS, 24)) == 0
    others = run.engine.drawn(PROMPTS, ids=[9, 1, 2, 3])
    assert [a[0] == b[0] for a, b in zip(first, others)] == [False, True, True, True]


def sent(run, seed):
    """New weights in the engine, whose prefix cache stays."""
    run.trainer.move(seed)
    weights = run.trainer.weights()
    run.engine.llm.apply_model(lambda model: len(model.load_weights(iter(weights))))


def test_a_prefix_cache_of_old_weights(run, monkeypatch):
    from rl_consistency.integrations.vllm import model as model_module

    run.engine.drawn(PROMPTS)
    (fresh,) = random_prompts("fresh", [30])
    prompts = [fresh, *PROMPTS]
    sent(run, seed=1)
    with pytest.raises(ValueError, match="a logprob is no number"):
        differing(*[run.engine.drawn(prompts)] * 2)
    run.engine.llm.reset_prefix_cache()
    assert wrong(run, run.engine.drawn(PROMPTS)) == 0
    # Old keys that are not spoiled give numbers, and other ones than training.
    with monkeypatch.context() as mutant:
        mutant.setattr(model_module, "begin_step", lambda *given: None)
        sent(run, seed=2)
        assert wrong(run, run.engine.drawn(prompts), prompts) > 0
    run.engine.llm.reset_prefix_cache()
    assert wrong(run, run.engine.drawn(PROMPTS)) == 0


def test_weights_that_are_not_the_trainers(run):
    run.trainer.move(seed=3)
    (digest,) = run.engine.llm.apply_model(lambda model: model.digest())
    assert digest != rlc.model_digest(run.trainer.model)
    assert wrong(run, run.engine.drawn(PROMPTS)) > 0
    run.engine.load(run.trainer.weights())
    (digest,) = run.engine.llm.apply_model(lambda model: model.digest())
    assert digest == rlc.model_digest(run.trainer.model)
    assert wrong(run, run.engine.drawn(PROMPTS)) == 0


@pytest.mark.parametrize("mutated", [False, True])
def test_padding_that_writes_keys(mutated, tmp_path, monkeypatch):
    from rl_consistency.integrations.vllm.steps import DecodeLayouts

    real = DecodeLayouts.layout

    def writing(self, step, cache):
        found = real(self, step, cache)
        # The first slot of vLLM's first block, which a sequence holds.
        taken = torch.full_like(found.slot_mapping, found.block_size)
        slots = step.common.slot_mapping
        found.slot_mapping.copy_(torch.where(slots < 0, taken, slots))
        return found

    if mutated:
        monkeypatch.setattr(DecodeLayouts, "layout", writing)
    folder = checkpoint(tmp_path / "model")
    with engine_of(folder, "eight") as engine:
        found = engine.drawn(THREE)
        run = SimpleNamespace(trainer=Trainer.of(folder))
        assert (wrong(run, found, THREE) > 0) == mutated


@pytest.mark.parametrize("mutated", [False, True])
def test_padding_that_is_routed_to_experts(mutated, tmp_path, monkeypatch):
    from rl_consistency.integrations.vllm.steps import DecodeLayouts

    real = DecodeLayouts.layout

    def routed(self, step, cache):
        found = real(self, step, cache)
        found.numbers.tokens.fill_(1)
        return found

    if mutated:
        monkeypatch.setattr(DecodeLayouts, "layout", routed)
    folder = checkpoint(tmp_path / "model", "qwen3_moe")
    with engine_of(folder, "eight") as engine:
        found = engine.drawn(THREE)
        (routing,) = engine.llm.apply_model(lambda model: model.routing())
    trainer = Trainer.of(folder)
    assert differing(found, trainer.scored(THREE, found)) == 0
    # The last step had the last token but one of each sequence.
    with torch.no_grad():
        scored = rlc.token_logprobs(
            trainer.model,
            [prompt + tokens for prompt, (tokens, _) in zip(THREE, found)],
            prompt_lengths=[
                len(prompt) + len(tokens) - 1 for prompt, (tokens, _) in zip(THREE, found)
            ],
        )
    expected = set(zip(scored.routing.tolist(), (tokens[-2] for tokens, _ in found)))
    met = list(zip(*routing[:2].tolist()))
    assert expected <= set(met)
    assert (len(met) == len(THREE)) != mutated
