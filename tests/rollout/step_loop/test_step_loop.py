"""The loop runs one step ahead, and whatever it is asked, tokens and logprobs are those of a
sequence alone. On the toy model of `toy.py`, against its cache-free oracle."""

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.toy import PREFIX, check, expected, preempting, sequence_of, toy

Make = Callable[..., Any]
EVENTS = ("preemptions", "prefix_hit_tokens", "accepted_tokens", "discarded_rows")
"""Counted by the loop; all of it has to happen in random schedules, or they show nothing."""


def test_a_step_is_launched_before_the_one_before_is_waited_for():
    served = toy()
    sequences = [sequence_of([3, 4, 5], max_tokens=5, stop=frozenset())]
    served.run(sequences)
    events = served.runner.events
    assert events == ["launch", *["launch", "wait"] * 4, "wait"]
    check(sequences)


def test_a_sequence_is_never_launched_beyond_max_tokens():
    served = toy()
    sequences = [sequence_of([i], max_tokens=i, prompt_id=i, stop=frozenset()) for i in range(1, 9)]
    served.run(sequences)
    rows = sum(chunk.samples for chunks in served.runner.history for chunk in chunks)
    assert rows == sum(len(sequence.token_logprobs) for sequence in sequences) == 36
    assert served.loop.statistics.discarded_rows == 0


def test_a_stop_token_is_seen_one_step_late_and_the_extra_row_is_thrown_away():
    sequences = [sequence_of([i, 5], max_tokens=30, prompt_id=i) for i in range(12)]
    served = toy()
    served.run(sequences)
    stopped = [s for s in sequences if s.finish_reason == "stop"]
    assert stopped and served.loop.statistics.discarded_rows == len(stopped)
    check(sequences)
    served.check_empty()


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 7]))
    longest = 20 + 14
    fewest = -(-longest // block_size)
    return {
        "engine": {
            "block_size": block_size,
            "num_blocks": draw(st.integers(fewest, 3 * fewest)),
            "max_batch_tokens": draw(st.integers(1, 40)),
            "max_num_seqs": draw(st.integers(1, 9)),
            "prefill_chunk_size": draw(st.one_of(st.none(), st.integers(1, 12))),
            "share_prefixes": draw(st.booleans()),
        },
        "requests": draw(
            st.lists(
                st.tuples(
                    st.integers(0, len(PREFIX)),  # length of the common prefix
                    st.lists(st.integers(0, 11), min_size=1, max_size=6),
                    st.integers(1, 14),  # max_tokens
                    st.integers(0, 7),  # speculation
                    st.integers(0, 30),  # step of its arrival
                    st.one_of(st.none(), st.integers(0, 40)),  # step of its cancellation
                ),
                min_size=1,
                max_size=14,
            )
        ),
        "fails": draw(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(2, 30)))),
        "preempted": draw(st.sets(st.integers(2, 40), max_size=8)),
    }


def serve(work):
    fails_at = frozenset({work["fails"]} if work["fails"] else ())
    scheduler = preempting(work["preempted"])
    served = toy(fails_at=fails_at, scheduler=scheduler, **work["engine"])
    sequences = [
        sequence_of(
            PREFIX[:shared] + own, max_tokens=most, prompt_id=index, speculation=speculation
        )
        for index, (shared, own, most, speculation, _, _) in enumerate(work["requests"])
    ]
    for step in range(41):
        for sequence, (*_, arrival, cancellation) in zip(sequences, work["requests"], strict=True):
            if arrival == step:
                served.loop.add(sequence)
            if cancellation == step and arrival <= step and not sequence.is_finished:
                served.loop.cancel(sequence)
        served.loop.step()
    served.finish()
    return served, sequences


def test_no_schedule_moves_a_token_or_a_logprob():
    seen = Counter()

    @settings(deadline=None, derandomize=True, max_examples=150)
    @given(work=workloads())
    def any_schedule(work):
        served, sequences = serve(work)
        for sequence in sequences:
            token_ids, logprobs = expected(sequence)
            num_tokens = sequence.num_tokens
            assert sequence.token_ids == token_ids[:num_tokens]
            assert sequence.token_logprobs == logprobs[: num_tokens - sequence.num_prompt_tokens]
            if sequence.finish_reason == "error":
                assert work["fails"] == (sequence.prompt_id, num_tokens)
                assert f"position {num_tokens}" in (sequence.error or "")
            elif sequence.finish_reason != "cancelled":
                assert len(token_ids) == num_tokens
            seen[str(sequence.finish_reason)] += 1
        served.check_empty()
        statistics = served.loop.statistics
        seen.update({event: getattr(statistics, event) for event in EVENTS})

    any_schedule()
    assert all(seen[event] for event in (*EVENTS, "stop", "length", "cancelled", "error")), seen


@pytest.mark.thorough
def test_memory_is_flat_over_ten_thousand_requests():
    rng = random.Random(6)
    served = toy(num_blocks=15, max_num_seqs=12, max_batch_tokens=48)

    def serve(numbers):
        """Bytes that Python holds after so many more requests."""
        for number in numbers:
            prompt = PREFIX[: rng.randrange(len(PREFIX))] + [rng.randrange(12)]
            sequence = sequence_of(prompt, max_tokens=rng.randint(1, 12), prompt_id=number)
            served.loop.add(sequence)
            if rng.random() < 0.2:
                served.loop.cancel(sequence)
            if number % 20 == 19:
                served.finish()
                # The toy's own records; what is asked is what the loop keeps.
                served.runner.history.clear()
                served.runner.events.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        settled = serve(range(2_000))
        grown = serve(range(2_000, 10_000)) - settled
    finally:
        tracemalloc.stop()
    assert grown < 50_000
    served.check_empty()
    assert len(served.blocks._by_key) <= 15
