"""Random schedules of a real model: every sample's bytes are those of the sample alone, and those
that training recomputes. (The toy model of `test_step_loop.py` sees many more schedules.)"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout import engine as engine_module
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import Recalling
from tests.rollout.toy import preempting

EVENTS = ("preemptions", "prefix_hit_tokens", "accepted_tokens", "discarded_rows")
"""Counted by the engine; all of it has to happen in random schedules, or they show nothing."""

VOCAB, STOP = 97, 7
SHARED = [(5 * i + 2) % 60 for i in range(21)]
PROMPTS = [SHARED, [*SHARED[:17], 61, 62], [3], [*SHARED[:8], 64], [8, 9] * 12, [*SHARED, 65]]
SAMPLING = [
    SamplingParams(n=2, max_tokens=12, seed=3),
    SamplingParams(max_tokens=20, temperature=0.7, top_k=40, top_p=0.9, seed=3),
    SamplingParams(n=2, max_tokens=17, temperature=1.4, min_p=0.05, stop_token_ids=(17,), seed=9),
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True),
    SamplingParams(n=2, max_tokens=6, top_k=3, seed=1),
]


@dataclass
class Served:
    model: Qwen3ForCausalLM
    alone: dict[tuple[int, int], tuple[list[int], bytes]]
    """By (prompt, sample): tokens, and the bytes of their logprobs."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def served(request, tiny_qwen3):
    model = tiny_qwen3(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=192, head_dim=64, initializer_range=0.2
    )
    model.bfloat16().to(request.param)
    with patch(model):
        engine = engine_of(model, max_num_seqs=1, enable_prefix_sharing=False, cuda_graphs=False)
        completions = [
            completion
            for index, prompt in enumerate(PROMPTS)
            for completion in engine.generate([prompt], SAMPLING[index], prompt_ids=[index])
        ]
        owners = [index for index, params in enumerate(SAMPLING) for _ in range(params.n)]
        with torch.no_grad():
            recomputed = token_logprobs(
                model,
                [PROMPTS[i] + c.token_ids for i, c in zip(owners, completions, strict=True)],
                prompt_lengths=[len(PROMPTS[i]) for i in owners],
                sampling=[SAMPLING[i] for i in owners],
            ).split()
        alone = {
            (i, c.sample_index): (c.token_ids, c.token_logprobs.numpy().tobytes())
            for i, c in zip(owners, completions, strict=True)
        }
        assert [logprobs for _, logprobs in alone.values()] == [
            part.cpu().numpy().tobytes() for part in recomputed
        ]
        yield Served(model, alone)


def engine_of(model, **options):
    return RolloutEngine(model, eos_token_id=STOP, **{"num_kv_blocks": 200, **options})


@st.composite
def schedules(draw):
    block_size = draw(st.sampled_from([1, 4, 16]))
    fewest = -(-42 // block_size)  # the longest sample has 24 + 18 tokens
    return {
        "options": {
            "kv_block_size": block_size,
            "num_kv_blocks": draw(st.integers(fewest, 2 * fewest) | st.just(300)),
            "max_num_seqs": draw(st.integers(1, 10)),
            "max_batch_tokens": draw(st.sampled_from([1, 9, 64, 2048])),
            "prefill_chunk_size": draw(st.none() | st.integers(1, 24)),
            "enable_prefix_sharing": draw(st.booleans()),
            "cuda_graphs": draw(st.booleans()),
        },
        "order": draw(st.permutations(range(len(PROMPTS)))),
        "arrivals": draw(st.lists(st.integers(0, 12), min_size=6, max_size=6)),
        "speculation": draw(st.lists(st.sampled_from([0, 1, 3, 7]), min_size=6, max_size=6)),
        "cancelled": draw(st.none() | st.tuples(st.integers(0, 5), st.integers(1, 12))),
        "preempted": draw(st.sets(st.integers(2, 40), min_size=2, max_size=8)),
    }


def serve(served, schedule):
    texts = [[*PROMPTS[i], *tokens] for (i, _), (tokens, _) in served.alone.items()]
    engine = engine_of(served.model, drafter=Recalling(texts), **schedule["options"])
    completions = []
    for step in range(13):
        for index in schedule["order"]:
            if schedule["arrivals"][index] == step:
                params = replace(SAMPLING[index], speculation=schedule["speculation"][index])
                name = str(index)
                engine.submit([PROMPTS[index]], params, prompt_ids=[index], request_ids=[name])
        if schedule["cancelled"] is not None and schedule["cancelled"][1] == step:
            engine.cancel(str(schedule["cancelled"][0]))
        completions += engine.step()
    while engine.has_unfinished:
        completions += engine.step()
    return engine, completions


def test_no_schedule_moves_a_byte(served):
    seen = Counter()

    @settings(deadline=None, derandomize=True, max_examples=12)
    @given(schedule=schedules())
    def any_schedule(schedule):
        with pytest.MonkeyPatch.context() as patched:
            # Of every rollout: the engine makes a new one whenever it was idle.
            patched.setattr(engine_module, "Scheduler", preempting(schedule["preempted"]))
            engine, completions = serve(served, schedule)
        assert len(completions) == len(served.alone)
        for c in completions:
            token_ids, logprobs = served.alone[int(c.request_id), c.sample_index]
            found = c.token_logprobs.numpy().tobytes()
            if c.finish_reason == "cancelled":
                assert token_ids[: len(c.token_ids)] == c.token_ids and logprobs.startswith(found)
            else:
                assert (c.token_ids, found) == (token_ids, logprobs)
            seen[c.finish_reason] += 1
        assert engine._blocks.num_free_blocks == engine._blocks.num_blocks
        seen.update({event: getattr(engine.stats, event) for event in EVENTS})

    any_schedule()
    assert all(seen[event] for event in (*EVENTS, "stop", "length", "cancelled")), seen
