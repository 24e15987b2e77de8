"""Calls without a seed draw fresh noise, reproducibly; a given seed that repeats noise is told."""

import warnings
from dataclasses import replace

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.seeds import Seeds
from tests.rollout.engine.engines import content, engine_of

PROMPTS = [[1, 2, 3], [4, 5]]
FRESH = SamplingParams(n=2, max_tokens=5)
GREEDY = replace(FRESH, temperature=0.0)


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    with patch(built := tiny_qwen3()):
        yield built


def drawn(seeds, count):
    """The next seeds of a stream, whose place stays."""
    state, found = seeds.state_dict(), []
    for number in range(count):
        seeds.load_state_dict({**state, "num_drawn": state["num_drawn"] + number})
        found.append(seeds.resolved([FRESH])[0].seed)
    seeds.load_state_dict(state)
    return found


def test_each_call_draws_its_own_noise_and_reports_its_seed(model):
    engine = engine_of(model)
    calls = [engine.generate(PROMPTS, FRESH) for _ in range(4)]
    assert len({str(content(call)) for call in calls}) == 4
    seeds = [{completion.seed for completion in call} for call in calls]
    assert all(len(each) == 1 for each in seeds) and len(set.union(*seeds)) == 4
    for call, (seed,) in zip(calls, seeds, strict=True):
        assert content(engine.generate(PROMPTS, replace(FRESH, seed=seed))) == content(call)


def test_equal_engines_draw_equal_seeds_and_no_global_state_moves(model):
    before = torch.random.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        engine = engine_of(model, seed=seed)
        runs.append([c.seed for _ in range(2) for c in engine.generate(PROMPTS, FRESH)])
    assert runs[0] == runs[1] and not {*runs[0]} & {*runs[2]}
    assert torch.equal(before, torch.random.get_rng_state())


def test_greedy_and_seeded_calls_and_refused_ones_leave_the_stream_in_its_place(model):
    engine = engine_of(model)
    (expected,) = drawn(engine._requests.seeds, 1)
    engine.generate(PROMPTS, GREEDY)
    engine.generate(PROMPTS, replace(FRESH, seed=3))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[1], []], FRESH)
    assert engine.generate(PROMPTS, FRESH)[0].seed == expected


def test_a_saved_place_continues_the_stream(model):
    engine = engine_of(model, seed=5)
    engine.generate(PROMPTS, FRESH)
    state = engine.state_dict()
    expected = content(engine.generate(PROMPTS, FRESH))
    other = engine_of(model)
    other.load_state_dict(state)
    assert content(other.generate(PROMPTS, FRESH)) == expected
    for bad in ({}, None, {"seed": 1}, {"seed": -1, "num_drawn": 0}, {"seed": 0, "num_drawn": 1.0}):
        with pytest.raises(ValueError, match="state|seed|num_drawn"):
            other.load_state_dict(bad)


def test_ranks_draw_other_seeds(monkeypatch):
    alone = drawn(Seeds(7), 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    found = []
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found += drawn(Seeds(7), 3)
    assert found[:3] == alone and len({*found}) == 9
    assert all(0 <= seed < 2**63 for seed in found)


def test_prompts_without_a_seed_join_those_under_way(model):
    engine = engine_of(model)
    for sampling in (FRESH, FRESH, GREEDY, GREEDY, [replace(FRESH, seed=1), FRESH]):
        engine.submit(PROMPTS, sampling)
    found = []
    while engine.has_unfinished:
        found += engine.step()
    assert len({c.seed for c in found}) == 4  # greedy ones draw none: they have the next


def changed(model):
    """Moves a weight."""
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 0.5


def test_a_given_seed_under_other_weights_is_told_once(model):
    engine, seeded = engine_of(model), replace(FRESH, seed=17)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(PROMPTS, seeded)
        engine.generate(PROMPTS, seeded)  # an evaluation, repeated
        changed(model)
        engine.generate(PROMPTS, seeded, prompt_ids=[2, 3])  # as a trainer keeps its noise fresh
        engine.generate(PROMPTS, replace(seeded, seed=18))
        engine.generate(PROMPTS, replace(seeded, temperature=0.0))
        engine.generate(PROMPTS, FRESH)
    with pytest.warns(UserWarning, match="seed 17 and prompt id 1 .*leave `seed` out") as told:
        engine.generate([[9]], seeded, prompt_ids=[1])  # another prompt, the same noise
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(PROMPTS, seeded)


def test_what_is_remembered_of_given_seeds_is_bounded(model, monkeypatch):
    monkeypatch.setattr("rl_consistency.rollout.seeds.MOST_KEPT", 3)
    engine = engine_of(model)
    for seed in range(4):
        engine.generate(PROMPTS, replace(FRESH, seed=seed))
    assert [*engine._requests.seeds._given] == [(2, 1), (3, 0), (3, 1)]
