"""Reuse of the cache from one call to the next, and the hand-over of weights."""

import itertools

import pytest
import torch

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout import weights
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.step_watch import StepWatch
from rl_consistency.rollout.weights import model_digest
from tests.rollout.engine.engines import content, engine_of, is_idle

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 59, 11, 12], list(range(20, 33))]
SAMPLING = [SamplingParams(n=2, max_tokens=n, seed=4) for n in (6, 21, 9, 14)]


@pytest.fixture
def changed(model):
    """Changes a weight in place, as an optimizer step does; undone after the test."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    kept = weight.detach().clone()

    @torch.no_grad()
    def change():
        weight.mul_(1.25)

    yield change
    with torch.no_grad():
        weight.copy_(kept)


@pytest.fixture(scope="module")
def expected(model):
    return content(engine_of(model).generate(PROMPTS, SAMPLING))


# The cache from one call to the next.


def turns(engine, between=lambda: None):
    """A conversation of two turns: the second turn's completions, and what it found."""
    (first,) = engine.generate([PROMPTS[3]], SamplingParams(max_tokens=14, seed=4))
    between()
    prompt = [*PROMPTS[3], *first.token_ids, 5, 6]
    completions = engine.generate([prompt], SamplingParams(max_tokens=9, seed=5, n=2))
    return (prompt, content(completions)), engine.stats.prefix_hit_tokens


def test_a_second_turn_finds_the_first_in_the_cache(model):
    engine = engine_of(model)
    (prompt, second), found = turns(engine)
    # The first sample finds the 24 full tokens of 26 computed before; its sibling finds 28.
    assert found == 24 + 28
    fresh = engine_of(model, enable_prefix_sharing=False)
    params = SamplingParams(max_tokens=9, seed=5, n=2)
    assert content(fresh.generate([prompt], params)) == second


def test_weights_that_were_written_but_not_changed_keep_the_cache(model):
    weight = model.model.layers[0].self_attn.k_proj.weight

    @torch.no_grad()
    def rewrite():
        weight.copy_(weight.clone())

    assert turns(engine_of(model), between=rewrite)[1] == 24 + 28


def test_other_ops_drop_the_cache(model):
    engine = engine_of(model)
    engine.generate([PROMPTS[3]], SamplingParams())
    with strict(False):
        engine.generate([PROMPTS[3]], SamplingParams())
        assert engine.stats.prefix_hit_tokens == 0
    engine.generate([PROMPTS[3]], SamplingParams())
    assert engine.stats.prefix_hit_tokens == 0
    engine.generate([PROMPTS[3]], SamplingParams())
    assert engine.stats.prefix_hit_tokens == 12


def test_a_cache_kept_over_new_weights_is_caught(model, changed, monkeypatch):
    """Negative control."""
    engine = engine_of(model)
    monkeypatch.setattr(engine._weights, "take_over", lambda *_: False)
    monkeypatch.setattr(type(engine._weights), "digest", "")
    monkeypatch.setattr(engine._weights, "in_step", lambda is_busy: None)
    monkeypatch.setattr(engine._weights, "after_step", lambda: None)
    monkeypatch.setattr(engine._weights, "after_rollout", lambda: None)
    (prompt, second), _ = turns(engine, between=changed)
    params = SamplingParams(max_tokens=9, seed=5, n=2)
    assert content(engine_of(model).generate([prompt], params)) != second


# The hand-over of weights.


def test_the_digest_of_the_weights_in_use_is_accepted(model, expected):
    digest = model_digest(model)
    completions = engine_of(model).generate(PROMPTS, SAMPLING, weights_digest=digest)
    assert content(completions) == expected


def test_another_digest_is_refused_naming_both(model, expected):
    engine = engine_of(model)
    with pytest.raises(ConsistencyError, match=f"digest other .* digest {model_digest(model)}"):
        engine.generate(PROMPTS, SAMPLING, weights_digest="other")
    assert is_idle(engine)
    engine.submit(PROMPTS[:1], SAMPLING[:1])
    with pytest.raises(ConsistencyError, match="handed over with digest other"):
        engine.submit(PROMPTS[1:], SAMPLING[1:], prompt_ids=[1, 2, 3], weights_digest="other")
    while engine.has_unfinished:
        engine.step()
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


@pytest.mark.parametrize("within", [False, True])
def test_a_write_that_no_step_sees_is_an_error(model, changed, monkeypatch, within):
    """By the digest at the end, and at steps drawn at random."""
    monkeypatch.setattr(StepWatch, "look", lambda *_: None)
    monkeypatch.setattr(weights, "_MEAN_STEPS", 1 if within else 10**6)
    engine, calls = engine_of(model), itertools.count(1)
    memory = model.model.layers[0].self_attn.k_proj.weight.data

    def write(*_):
        if next(calls) == 3:
            memory.mul_(1.01)

    with pytest.raises(ConsistencyError, match="during generation: their digest was .* and is"):
        engine.generate(PROMPTS, SAMPLING, progress=write)
    assert (next(calls) == 4) == within and is_idle(engine)
