"""A request whose numbers are not finite fails, and no other that shares a prefix with it."""

import math
import random
from dataclasses import replace

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.rollout.failures import Failures
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import Recalling, content, engine_of, is_idle

MARK = 7
"""A token whose embedding is NaN."""
PREFIX = [20, 21, 22, 23, 24, 25, 26, 27, 28]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def marked(tiny_qwen3):
    model = tiny_qwen3()
    with torch.no_grad():
        model.model.embed_tokens.weight[MARK] = math.nan
    with patch(model):
        yield model


def served(engine, prompts, sampling):
    """What each sample gave, (prompt, sample) -> its bytes, and "error" in the place of one that
    failed."""
    completions = list(engine.stream(prompts, sampling))
    assert is_idle(engine)
    found = content([c for c in completions if c.error is None])
    return found | {(c.prompt_index, c.sample_index): "error" for c in completions if c.error}


@pytest.mark.parametrize("max_batch_tokens", [4, 7, 512])
@pytest.mark.parametrize("kv_block_size", [1, 4])
def test_a_neighbour_with_the_same_prefix_keeps_its_bytes(marked, kv_block_size, max_batch_tokens):
    options = {"kv_block_size": kv_block_size, "max_batch_tokens": max_batch_tokens}
    failing, fine = [*PREFIX, MARK, 9], [*PREFIX, 10, 11]
    alone = served(engine_of(marked, **options), [fine], GREEDY)[0, 0]
    assert alone != "error"
    for prompts in ([failing, fine], [fine, failing], [failing, fine, failing, fine]):
        found = served(engine_of(marked, **options), prompts, GREEDY)
        assert found == {
            (i, 0): "error" if prompt is failing else alone for i, prompt in enumerate(prompts)
        }


def test_without_starting_over_a_neighbour_fails_too(marked, monkeypatch):
    monkeypatch.setattr(Failures, "may_pass_alone", lambda *_, **__: False)
    found = served(engine_of(marked), [[*PREFIX, MARK, 9], [*PREFIX, 10, 11]], GREEDY)
    assert found == {(0, 0): "error", (1, 0): "error"}


def test_a_later_call_finds_nothing_of_a_request_that_failed(marked):
    failing, fine = [*PREFIX, MARK, 9], [*PREFIX, 10, 11]
    engine = engine_of(marked)
    alone = served(engine_of(marked), [fine], GREEDY)[0, 0]
    assert served(engine, [failing], GREEDY) == {(0, 0): "error"}
    assert served(engine, [fine], GREEDY) == {(0, 0): alone}
    assert engine.stats.prefix_hit_tokens == 0
    assert served(engine, [fine], GREEDY) == {(0, 0): alone}
    assert engine.stats.prefix_hit_tokens > 0


class Misleading(Recalling):
    """A drafter that sometimes guesses the token whose row is NaN."""

    def start(self, token_ids):
        inner = super().start(token_ids)
        propose = inner.propose
        inner.propose = lambda most: [*propose(most - 1), MARK][:most]
        return inner


@pytest.mark.parametrize("kv_block_size", [1, 4, 16])
@pytest.mark.parametrize("speculation", [1, 2, 7])
def test_a_wrong_guess_that_is_not_finite_fails_nobody(marked, speculation, kv_block_size):
    prompts = [PREFIX, [30, 31], [*PREFIX, MARK]]
    plain = SamplingParams(max_tokens=8, temperature=0.0)
    expected = served(engine_of(marked), prompts, plain)
    assert "error" not in (expected[0, 0], expected[1, 0]) and expected[2, 0] == "error"
    engine = engine_of(marked, kv_block_size=kv_block_size, drafter=Misleading([]))
    assert served(engine, prompts, replace(plain, speculation=speculation)) == expected
    assert engine.stats.drafted_tokens > 0 and engine.stats.started_over >= 2


def test_samples_of_a_prompt_that_failed_by_itself_do_not_start_over(marked):
    prompt = [*PREFIX, MARK, 9]
    engine = engine_of(marked)
    found = served(engine, [prompt], replace(GREEDY, n=6, temperature=1.0))
    assert found == {(0, sample): "error" for sample in range(6)}
    assert engine.stats.started_over == 0 and engine.stats.prefix_hit_tokens > 0


@pytest.mark.thorough
@pytest.mark.parametrize("misleads", [False, True])
def test_whatever_shares_a_prefix_with_whatever_fails(marked, misleads):
    """Random prompts that share prefixes, in small caches that preempt, with and without drafts."""
    failures = preemptions = hits = 0
    for seed in range(10):
        rng = random.Random(seed)
        prompts = []
        for _ in range(rng.randint(2, 5)):
            tail = rng.choices((MARK, 10, 11, 12, 13), (1, 3, 3, 3, 3), k=rng.randint(1, 6))
            prompts.append([*PREFIX[: rng.choice((0, 4, 8, 9))], *tail])
        sampling = SamplingParams(
            n=rng.randint(1, 3), max_tokens=14, temperature=1.0, seed=seed,
            speculation=rng.choice((0, 2)),
        )  # fmt: skip
        apart = served(engine_of(marked, enable_prefix_sharing=False), prompts, sampling)
        texts = [[*prompts[p], *done[0]] for (p, _), done in apart.items() if done != "error"]
        engine = engine_of(
            marked,
            num_kv_blocks=rng.choice((9, 12, 200)),
            max_num_seqs=rng.choice((2, 8)),
            max_batch_tokens=rng.choice((5, 9, 512)),
            drafter=(Misleading if misleads else Recalling)(texts),
        )
        for _ in range(2):
            assert served(engine, prompts, sampling) == apart
        failures += sum(done == "error" for done in apart.values())
        preemptions += engine.stats.preemptions
        hits += engine.stats.prefix_hit_tokens
    assert failures > 20 and preemptions > 5 and hits > 50
