"""Greedy tokens with the logprobs of the whole softmax: the bytes that training recomputes."""

from dataclasses import replace

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset
from tests.rollout.engine.engines import content, engine_of

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 59, 11, 12], list(range(20, 33))]
ZERO = SamplingParams(temperature=0, max_tokens=11)
FULL = replace(ZERO, greedy_logprobs="full")
ENGINES = [{}, {"max_num_seqs": 1}, {"prefill_chunk_size": 3}, {"num_kv_blocks": 10}]


def scored(model, completions, sampling):
    sequences = [[*PROMPTS[c.prompt_index], *c.token_ids] for c in completions]
    lengths = [len(PROMPTS[c.prompt_index]) for c in completions]
    with torch.no_grad():
        return token_logprobs(model, sequences, prompt_lengths=lengths, sampling=sampling)


@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-olmoe"])
def test_rollout_and_training_agree_on_the_whole_softmax(family):
    with patch(model := build_preset(family)):
        found = engine_of(model).generate(PROMPTS, FULL)
        zero = engine_of(model).generate(PROMPTS, ZERO)
        assert [c.token_ids for c in found] == [c.token_ids for c in zero]
        assert all(not c.token_logprobs.any() for c in zero)
        own = torch.cat([c.token_logprobs for c in found])
        assert (own < 0).all()
        for sampling in (FULL, [FULL] * 4, None, SamplingParams()):
            assert torch.equal(scored(model, found, sampling).logprobs, own)
        assert not scored(model, found, ZERO).logprobs.any()
        for settings in ENGINES:
            assert content(engine_of(model, **settings).generate(PROMPTS, FULL)) == content(found)
        for drafting in (replace(FULL, speculation=3), replace(FULL, top_k=3, top_p=0.5)):
            assert content(engine_of(model).generate(PROMPTS, drafting)) == content(found)


def test_other_samples_of_a_step_keep_their_logprobs(model):
    drawn = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=11)
    alone = [engine_of(model).generate(PROMPTS, each) for each in (FULL, ZERO, drawn)]
    mixed = engine_of(model).generate(PROMPTS[:3], [FULL, ZERO, drawn])
    assert content(mixed) == content([alone[i][i] for i in range(3)])


def test_a_token_of_other_weights_is_no_error_and_has_its_logprob(model):
    """Nothing is ruled out, so a KL term or a second update may score it."""
    found = engine_of(model).generate(PROMPTS, FULL)
    other = [replace(c, token_ids=[5] * len(c.token_ids)) for c in found]
    assert scored(model, other, FULL).logprobs.isfinite().all()
    with pytest.raises(ValueError, match="outside the support"):
        scored(model, other, ZERO)
