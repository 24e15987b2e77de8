"""Cancellation, failures, drafts and preemption while the loop runs, and what is counted."""

from collections.abc import Callable
from typing import Any

import pytest

from rl_consistency.rollout.sequence import RolloutSequence
from tests.rollout.toy import PREFIX, check, expected, load, sequence_of, toy

Make = Callable[..., Any]


# Cancellation.


def test_blocks_of_a_cancelled_sequence_are_handed_on_while_its_step_is_under_way():
    served = toy(num_blocks=5)
    first, second = (sequence_of([i] * 9, max_tokens=8, prompt_id=i) for i in (1, 2))
    served.loop.add(first)
    for _ in range(4):
        served.loop.step()
    assert served.runner.in_flight
    served.loop.cancel(first)
    served.run([second])
    check([second])


# Logprobs that are not finite.


def test_a_failure_behind_a_rejected_guess_is_none():
    """Only positions that plain decoding reaches can fail."""
    for position in range(3, 24):
        sequence = sequence_of([2, 9] * 1, max_tokens=20, speculation=7)
        served = toy(fails_at=frozenset({(0, position)}))
        served.run([sequence])
        token_ids, _ = expected(sequence)
        assert sequence.token_ids == token_ids[: min(position, len(token_ids))]


# Speculation.


def test_right_guesses_save_steps_and_are_counted():
    steps = {}
    for speculation in (0, 7):
        sequence = sequence_of(
            [1, 4, 0] * 4, max_tokens=60, speculation=speculation, stop=frozenset()
        )
        served = toy()
        served.run([sequence])
        check([sequence])
        statistics = served.loop.statistics
        steps[speculation] = statistics.steps
        assert (statistics.drafted_tokens > 0) == (speculation > 0)
        assert 0 <= statistics.accepted_tokens <= statistics.drafted_tokens
    assert steps[7] < 0.75 * steps[0] == 0.75 * 60


def test_a_draft_stays_within_max_tokens():
    for max_tokens in range(1, 12):
        sequence = sequence_of([1, 4, 0] * 4, max_tokens=max_tokens, speculation=7)
        served = toy()
        served.run([sequence])
        drafts = [c for chunks in served.runner.history for c in chunks if c.draft]
        assert all(c.end < sequence.max_num_tokens for c in drafts)
        assert len(sequence.token_ids) <= sequence.max_num_tokens


def test_drafting_sequences_share_steps_instead_of_taking_turns():
    def steps(prompt_ids):
        served = toy(num_blocks=200, max_batch_tokens=200)
        served.run(
            [
                sequence_of(
                    [1, 4, 0] * 4, max_tokens=60, prompt_id=i, speculation=7, stop=frozenset()
                )
                for i in prompt_ids
            ]
        )
        return served.loop.statistics.steps

    assert steps([*range(8)]) <= 1.1 * max(steps([i]) for i in range(8))


# Preemption.


def test_a_preempted_sequence_keeps_a_token_that_is_reported_after_it_lost_its_blocks():
    served = toy(num_blocks=7, share_prefixes=False)
    old, new = (sequence_of([i] * 7, max_tokens=15, prompt_id=i, stop=frozenset()) for i in (1, 2))
    served.loop.add(old)
    served.loop.step()
    served.loop.add(new)
    kept = []
    while served.loop.has_unfinished:
        before, pending = new.num_tokens, new.num_pending
        served.loop.step()
        if new.preempted and new.slot is None and pending:
            kept.append(new.num_tokens - before)
    assert served.loop.statistics.preemptions > 0 and kept[0] == 1
    check([old, new])


# Statistics.


def test_statistics_count_what_was_done():
    served = toy(share_prefixes=False)
    sequences = load()
    served.run(sequences)
    statistics = served.loop.statistics
    assert statistics.steps == len(served.runner.history)
    assert statistics.prefill_tokens == sum(s.num_prompt_tokens for s in sequences)
    assert statistics.decode_tokens == sum(len(s.token_logprobs) for s in sequences)
    assert 0 < statistics.peak_kv_blocks <= statistics.num_kv_blocks == 64
    assert statistics.peak_kv_share == statistics.peak_kv_blocks / 64
    assert 0 < statistics.host_seconds <= statistics.seconds
    assert 0 < statistics.mean_seconds_to_first_token < statistics.seconds
    assert statistics.decode_tokens_per_second > 0 < statistics.prefill_tokens_per_second
    assert statistics.host_seconds_per_step == statistics.host_seconds / statistics.steps
    assert statistics.acceptance_rate == 0.0


# Steps that fail.


def test_a_step_whose_launch_fails_shares_nothing(monkeypatch):
    served = toy()

    def out_of_memory(chunks):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(served.runner, "launch", out_of_memory)
    served.loop.add(sequence_of(PREFIX))
    with pytest.raises(RuntimeError):
        served.loop.step()
    assert served.blocks.match_prefix(sequence_of(PREFIX)).block_ids == []


def test_the_step_launched_beyond_the_last_end_is_taken_in_at_once():
    free = sequence_of([1, 2, 3], max_tokens=12, stop=frozenset())
    stop = expected(free)[0][7]
    sequence = sequence_of([1, 2, 3], max_tokens=12, stop=frozenset({stop}))
    served = toy()
    served.loop.add(sequence)
    while not served.loop.step():
        pass
    assert sequence.finish_reason == "stop" and not served.loop.has_unfinished
    assert not served.runner.in_flight and served.loop.statistics.discarded_rows == 1


def test_an_abandoned_loop_has_waited_and_holds_nothing():
    served = toy()
    served.loop.add(sequence_of(PREFIX, max_tokens=9))
    for _ in range(3):
        served.loop.step()
    assert served.runner.in_flight
    served.loop.abandon()
    assert not served.loop.has_unfinished and not served.runner.in_flight
    assert served.blocks.num_free_blocks == served.blocks.num_blocks
    assert served.blocks.match_prefix(sequence_of(PREFIX)).block_ids == []


def test_a_step_that_was_launched_is_not_lost_when_the_report_before_it_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such text")

    served = toy()
    sequence = sequence_of(PREFIX)
    served.loop.add(sequence)
    served.loop.step()
    monkeypatch.setattr(RolloutSequence, "append", fail)
    with pytest.raises(RuntimeError):
        served.loop.step()
    assert len(served.runner.in_flight) == 1
    served.loop.abandon()
    assert not served.runner.in_flight
