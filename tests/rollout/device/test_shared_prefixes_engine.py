"""Shared keys in whole rollouts, their graphs run on the CPU as they are: whatever comes and goes,
every run holds what it says, and the bytes are those of a rollout without graphs.

The layout on the CPU refuses a run whose sequences do not hold the same blocks.
"""

import random

import pytest
import torch

from rl_consistency.kernels.attention.layout import CapturedPagedAttention
from rl_consistency.rollout.device import decode_graphs, shared_prefixes
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.device.launches import uncaptured


@pytest.fixture
def runs(monkeypatch):
    """The runs of all calls; keys are shared in blocks of 8."""
    found = []
    in_force = CapturedPagedAttention.in_force

    def watched(layout):
        current = in_force(layout)
        found.extend(current.shared_runs)
        return current

    monkeypatch.setattr(CapturedPagedAttention, "in_force", watched)
    monkeypatch.setattr(shared_prefixes, "SHARED_BLOCK", 8)
    monkeypatch.setattr(decode_graphs, "reads_shared_keys_once", lambda cache: True)
    return found


def sharing_engine(model, **settings):
    engine = RolloutEngine(model, eos_token_id=3, **settings)
    uncaptured(engine._runner)
    return engine


def drawn(engine, prompts, sampling):
    return [
        (c.prompt_index, c.sample_index, c.token_ids, c.token_logprobs.view(torch.int32).tolist())
        for c in engine.generate(prompts, sampling)
    ]


def test_samples_whose_first_step_is_a_decode_step_share_the_keys_of_their_own_prompt(model, runs):
    """All but the last token of each prompt fill whole cache blocks, so that the later samples of
    both prompts are admitted with one token left to compute."""
    prompts = [[(7 * i + 3 * n + 1) % 40 for n in range(9)] for i in range(2)]
    sampling = SamplingParams(n=4, max_tokens=4, seed=5, ignore_eos=True)
    engine = sharing_engine(model, kv_block_size=4, num_kv_blocks=200, max_num_seqs=8)
    plain = RolloutEngine(model, eos_token_id=3, num_kv_blocks=200, max_num_seqs=8)
    expected = drawn(plain, prompts, sampling)
    assert drawn(engine, prompts, sampling) == expected
    assert drawn(engine, prompts, sampling) == expected
    assert {run.keys for run in runs} == {8}


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_runs_hold_through_admissions_preemptions_drafts_and_cancelled_samples(model, runs, seed):
    draw = random.Random(seed)
    size, seats = draw.choice([1, 4, 8]), draw.choice([6, 12])
    engine = sharing_engine(
        model,
        kv_block_size=size,
        num_kv_blocks=draw.choice([160, 400]) // size,
        max_num_seqs=seats,
        max_batch_tokens=64,
    )
    plain = RolloutEngine(model, eos_token_id=3, num_kv_blocks=200, max_num_seqs=12)
    starts = [[draw.randrange(40) for _ in range(draw.choice([8, 17, 33]))] for _ in range(2)]
    for _ in range(2):
        prompts = [
            [*draw.choice(starts), *(draw.randrange(40) for _ in range(draw.choice([0, 1, 9])))]
            for _ in range(draw.randint(2, 4))
        ]
        sampling = SamplingParams(
            n=draw.choice([2, 5]),
            max_tokens=draw.choice([4, 24]),
            seed=seed,
            speculation=draw.choice([0, 7]),
        )
        cancelled = engine.stream(prompts, sampling)
        next(cancelled)
        cancelled.close()
        assert drawn(engine, prompts, sampling) == drawn(plain, prompts, sampling)
    assert runs
