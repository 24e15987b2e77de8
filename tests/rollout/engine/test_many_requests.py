"""Thousands of requests through one engine, many cancelled midway: nothing is kept of any."""

import gc
import random
from collections import Counter

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

STOP = 7
SHARED = [(5 * i + 2) % 60 for i in range(20)]
UNFINISHED = 12
"""Requests in the engine at a time: some find no seat, some no block."""

KINDS = [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01}]
EVENTS = ("preemptions", "prefix_hit_tokens", "drafted_tokens", "discarded_rows")
"""Counted by the engine; all of it has to happen, or the requests show little."""

SMALLEST_LEAK = 64 * 1024
"""Bytes: 128 of torch's smallest allocations, in 2,000 requests."""


@pytest.fixture(
    params=[("cpu", 500), pytest.param(("cuda", 10_000), marks=pytest.mark.gpu)],
    ids=lambda param: param[0],
)
def engine_and_count(request, tiny_qwen3):
    """An engine whose cache is often full, and how many requests it is to serve."""
    device, count = request.param
    model = tiny_qwen3(
        vocab_size=61, hidden_size=128, intermediate_size=192, head_dim=64, initializer_range=0.2
    )
    with patch(model.bfloat16().to(device)):
        engine = RolloutEngine(
            model,
            eos_token_id=STOP,
            kv_block_size=1,
            num_kv_blocks=40,
            max_num_seqs=8,
            max_batch_tokens=40,
        )
        for kind in KINDS:  # no graph is captured later
            engine.warm_up(SamplingParams(speculation=3, **kind))
        yield engine, count


def request_of(number):
    """A prompt that begins like others, and how to sample one or two short texts behind it."""
    rng = random.Random(number)
    prompt = [*SHARED[: rng.randrange(len(SHARED))], *[rng.randrange(60)] * rng.randint(1, 3)]
    sampling = SamplingParams(
        n=rng.choice((1, 1, 2)),
        max_tokens=rng.randint(1, 6),
        speculation=rng.choice((0, 3)),
        stop_token_ids=(11, 23, 31, 48),
        seed=3,
        **rng.choice(KINDS),
    )
    return prompt, sampling


def serve(engine, numbers):
    """Submit requests while others run, cancel some in whatever state they are, run to the end."""
    rng = random.Random(numbers.start)
    completions = []
    for number in numbers:
        prompt, sampling = request_of(number)
        engine.submit([prompt], sampling, prompt_ids=[number], request_ids=[str(number)])
        while len(engine._requests.live) >= UNFINISHED:
            completions += engine.step()
            if rng.random() < 0.5 and engine._requests.live:
                assert engine.cancel(rng.choice(list(engine._requests.live)))
    while engine.has_unfinished:
        completions += engine.step()
    return completions


def check_empty(engine):
    """Nothing is held any more: neither a block, nor a seat, nor a request."""
    blocks, scheduler = engine._blocks, engine._loop._scheduler
    assert blocks.num_free_blocks == blocks.num_blocks
    assert not any(block.ref_count for block in blocks._blocks)
    assert len(blocks._by_key) <= blocks.num_blocks
    assert len(scheduler._free_slots) == 8 and not scheduler._set_aside
    assert not engine._requests.live and not engine._requests.has_completions


def device_bytes(engine):
    """What lives on the engine's GPU; 0 on a CPU."""
    gc.collect()
    device = engine._runner.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def test_nothing_is_kept_of_many_requests(engine_and_count):
    engine, count = engine_and_count
    seen = Counter()
    completions = []
    held = []
    for begin, end in ((0, count // 3), (count // 3, count)):
        completions += serve(engine, range(begin, end))
        check_empty(engine)
        held.append(device_bytes(engine))
        seen.update({event: getattr(engine.stats, event) for event in EVENTS})
    assert held[1] - held[0] < SMALLEST_LEAK
    assert len(completions) == sum(request_of(number)[1].n for number in range(count))
    midway = [c for c in completions if c.finish_reason == "cancelled" and c.token_ids]
    seen.update(c.finish_reason for c in completions)
    assert all(seen[event] for event in (*EVENTS, "stop", "length")) and len(midway) > count // 50
    for number in range(0, count, count // 20):
        prompt, sampling = request_of(number)
        alone = engine.generate([prompt], sampling, prompt_ids=[number])
        together = [c for c in completions if c.request_id == str(number)]
        for c in together:
            whole = alone[c.sample_index]
            assert whole.token_ids[: len(c.token_ids)] == c.token_ids
            assert torch.equal(whole.token_logprobs[: len(c.token_ids)], c.token_logprobs)
            assert c.finish_reason in ("cancelled", whole.finish_reason)
