"""The loop runs one step ahead, and whatever it is asked, tokens and logprobs are those of a
sequence alone. On the toy model of `conftest.py`, against its cache-free oracle."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_consistency.rollout import scheduler
from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.scheduler import Sampled, ScheduledChunk, Scheduler
from rl_consistency.rollout.sequence import RolloutSequence

Make = Callable[..., Any]
STOP = 12
EVENTS = ("preemptions", "prefix_hit_tokens", "accepted_tokens", "discarded_rows")
"""Counted by the loop; all of it has to happen in random schedules, or they show nothing."""

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3]


def load(sequence_of: Make, *, speculation: int = 0, max_tokens: int = 14) -> list[RolloutSequence]:
    """Prompts with common prefixes, in groups, lengths all different."""
    prompts = [PREFIX, PREFIX[:9] + [7, 7], [5], [2, 9] * 10]
    return [
        sequence_of(
            prompt,
            max_tokens=max_tokens + 5 * sample - prompt_id,
            prompt_id=prompt_id,
            sample_index=sample,
            speculation=speculation,
            stop=frozenset({STOP} if sample else ()),
        )
        for prompt_id, prompt in enumerate(prompts)
        for sample in range(3)
    ]


def check(sequences: list[RolloutSequence], expected: Make) -> None:
    for sequence in sequences:
        assert (sequence.token_ids, sequence.token_logprobs) == expected(sequence)
        assert sequence.finish_reason in ("stop", "length") and sequence.num_pending == 0


def check_empty(served: Any) -> None:
    """Nothing is held any more: neither a block, nor a slot, nor a step."""
    assert served.blocks.num_free_blocks == served.blocks.num_blocks
    assert not any(block.ref_count for block in served.blocks._blocks)
    assert len(served.scheduler._free_slots) == served.runner.max_num_seqs
    assert not served.scheduler.has_unfinished and not served.runner.in_flight
    assert not served.scheduler._set_aside


def test_a_step_is_launched_before_the_one_before_is_waited_for(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    served = toy()
    sequences = [sequence_of([3, 4, 5], max_tokens=5, stop=frozenset())]
    served.run(sequences)
    events = served.runner.events
    assert events == ["launch", *["launch", "wait"] * 4, "wait"]
    check(sequences, expected)


def test_a_sequence_is_never_launched_beyond_max_tokens(toy: Make, sequence_of: Make) -> None:
    served = toy()
    sequences = [sequence_of([i], max_tokens=i, prompt_id=i, stop=frozenset()) for i in range(1, 9)]
    served.run(sequences)
    rows = sum(chunk.samples for chunks in served.runner.history for chunk in chunks)
    assert rows == sum(sequence.num_generated_tokens for sequence in sequences) == 36
    assert served.loop.statistics.discarded_rows == 0


def test_a_stop_token_is_seen_one_step_late_and_the_extra_row_is_thrown_away(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    sequences = [sequence_of([i, 5], max_tokens=30, prompt_id=i) for i in range(12)]
    served = toy()
    served.run(sequences)
    stopped = [s for s in sequences if s.finish_reason == "stop"]
    assert stopped and served.loop.statistics.discarded_rows == len(stopped)
    check(sequences, expected)
    check_empty(served)


@pytest.mark.parametrize("speculation", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("num_blocks", [11, 13, 20, 64])
@pytest.mark.parametrize(("max_batch_tokens", "chunk"), [(1, None), (7, 3), (64, 7), (64, None)])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
def test_every_limit_gives_the_tokens_of_a_sequence_alone(
    toy: Make,
    sequence_of: Make,
    expected: Make,
    max_num_seqs: int,
    max_batch_tokens: int,
    chunk: int | None,
    num_blocks: int,
    speculation: int,
) -> None:
    sequences = load(sequence_of, speculation=speculation)
    served = toy(
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
    )
    served.run(sequences)
    check(sequences, expected)
    check_empty(served)


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
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


def serve(
    toy: Make, sequence_of: Make, preempting: Make, work: dict[str, Any]
) -> tuple[Any, list[RolloutSequence]]:
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


def test_no_schedule_moves_a_token_or_a_logprob(
    toy: Make, sequence_of: Make, expected: Make, preempting: Make
) -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, derandomize=True, max_examples=150)
    @given(work=workloads())
    def any_schedule(work: dict[str, Any]) -> None:
        served, sequences = serve(toy, sequence_of, preempting, work)
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
        check_empty(served)
        statistics = served.loop.statistics
        seen.update({event: getattr(statistics, event) for event in EVENTS})

    any_schedule()
    assert all(seen[event] for event in (*EVENTS, "stop", "length", "cancelled", "error")), seen


def test_no_block_is_lost_over_ten_thousand_requests(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    rng = random.Random(5)
    served = toy(num_blocks=15, max_num_seqs=12, max_batch_tokens=48)
    live: list[RolloutSequence] = []
    reasons: dict[str | None, int] = {}
    peak = 0
    for number in range(10_000):
        sequence = sequence_of(
            PREFIX[: rng.randrange(len(PREFIX))] + [rng.randrange(12)],
            max_tokens=rng.randint(1, 12),
            prompt_id=number,
            speculation=rng.choice((0, 0, 3)),
        )
        served.loop.add(sequence)
        live.append(sequence)
        if rng.random() < 0.2:
            served.loop.cancel(live.pop(rng.randrange(len(live))))
        while len(live) > 30:
            ended = served.loop.step()
            for gone in ended:
                reasons[gone.finish_reason] = reasons.get(gone.finish_reason, 0) + 1
                if gone.prompt_id % 10 == 0:
                    assert (gone.token_ids, gone.token_logprobs) == expected(gone)
            live = [s for s in live if not s.is_finished]
        peak = max(peak, len(served.scheduler._waiting))
    served.finish()
    check_empty(served)
    assert reasons["stop"] > 1000 and reasons["length"] > 1000
    statistics = served.loop.statistics
    assert statistics.preemptions > 50 and statistics.accepted_tokens > 1000
    # Ended sequences leave no trace: neither in the queue nor in the names of contents.
    assert peak < 150 and len(served.blocks._by_key) <= 15


def test_memory_is_flat_over_ten_thousand_requests(toy: Make, sequence_of: Make) -> None:
    rng = random.Random(6)
    served = toy(num_blocks=15, max_num_seqs=12, max_batch_tokens=48)

    def serve(numbers: range) -> int:
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


# Cancellation.


def test_a_cancelled_sequence_gives_its_blocks_back_at_once_and_stays_as_it_is(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    served = toy()
    first, second = (sequence_of([i] * 9, max_tokens=20, prompt_id=i) for i in (1, 2))
    served.loop.add(first)
    served.loop.add(second)
    for _ in range(5):
        served.loop.step()
    free, known = served.blocks.num_free_blocks, list(first.token_ids)
    held = len(first.block_table)
    served.loop.cancel(first)  # a step with a row of it is under way
    assert served.blocks.num_free_blocks == free + held and first.block_table == []
    served.finish()
    assert (first.finish_reason, first.token_ids) == ("cancelled", known)
    check([second], expected)
    check_empty(served)


def test_a_waiting_sequence_can_be_cancelled(toy: Make, sequence_of: Make) -> None:
    served = toy(max_num_seqs=1)
    first, second = (sequence_of([i], max_tokens=9, prompt_id=i) for i in (1, 2))
    served.loop.add(first)
    served.loop.add(second)
    served.loop.step()
    served.loop.cancel(second)
    served.finish()
    assert second.finish_reason == "cancelled" and second.num_generated_tokens == 0
    check_empty(served)


def test_blocks_of_a_cancelled_sequence_are_handed_on_while_its_step_is_under_way(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    served = toy(num_blocks=5)
    first, second = (sequence_of([i] * 9, max_tokens=8, prompt_id=i) for i in (1, 2))
    served.loop.add(first)
    for _ in range(4):
        served.loop.step()
    assert served.runner.in_flight
    served.loop.cancel(first)
    served.run([second])
    check([second], expected)


# Logprobs that are not finite.


def test_a_failing_sequence_names_its_position_and_the_others_go_on(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    sequences = [sequence_of([i, 5], max_tokens=9, prompt_id=i, stop=frozenset()) for i in range(4)]
    served = toy(fails_at=frozenset({(2, 6)}))
    served.run(sequences)
    failed = sequences.pop(2)
    assert failed.finish_reason == "error"
    assert "prompt 2, sample 0, position 6: the model gave a logprob" in (failed.error or "")
    assert failed.token_ids == expected(failed)[0][:6]
    check(sequences, expected)
    check_empty(served)


def test_a_failure_behind_a_rejected_guess_is_none(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    """Only positions that plain decoding reaches can fail."""
    for position in range(3, 24):
        sequence = sequence_of([2, 9] * 1, max_tokens=20, speculation=7)
        served = toy(fails_at=frozenset({(0, position)}))
        served.run([sequence])
        token_ids, _ = expected(sequence)
        assert sequence.token_ids == token_ids[: min(position, len(token_ids))]


# Speculation.


def test_right_guesses_save_steps_and_are_counted(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    steps = {}
    for speculation in (0, 7):
        sequence = sequence_of(
            [1, 4, 0] * 4, max_tokens=60, speculation=speculation, stop=frozenset()
        )
        served = toy()
        served.run([sequence])
        check([sequence], expected)
        statistics = served.loop.statistics
        steps[speculation] = statistics.steps
        assert (statistics.drafted_tokens > 0) == (speculation > 0)
        assert 0 <= statistics.accepted_tokens <= statistics.drafted_tokens
    assert steps[7] < 0.75 * steps[0] == 0.75 * 60


def test_a_draft_stays_within_max_tokens(toy: Make, sequence_of: Make) -> None:
    for max_tokens in range(1, 12):
        sequence = sequence_of([1, 4, 0] * 4, max_tokens=max_tokens, speculation=7)
        served = toy()
        served.run([sequence])
        drafts = [c for chunks in served.runner.history for c in chunks if c.draft]
        assert all(c.end < sequence.max_num_tokens for c in drafts)
        assert len(sequence.token_ids) <= sequence.max_num_tokens


def test_a_draft_without_room_in_the_cache_is_given_up(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    sequences = [
        sequence_of([1, 4, 0] * 4, max_tokens=13, prompt_id=i, speculation=7) for i in range(2)
    ]
    served = toy(num_blocks=9)
    served.run(sequences)
    check(sequences, expected)


def test_drafting_sequences_share_steps_instead_of_taking_turns(
    toy: Make, sequence_of: Make
) -> None:
    def steps(prompt_ids: list[int]) -> int:
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


def test_a_preempted_sequence_keeps_a_token_that_is_reported_after_it_lost_its_blocks(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
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
    check([old, new], expected)


# Statistics.


def test_statistics_count_what_was_done(toy: Make, sequence_of: Make) -> None:
    served = toy(share_prefixes=False)
    sequences = load(sequence_of)
    served.run(sequences)
    statistics = served.loop.statistics
    assert statistics.steps == len(served.runner.history)
    assert statistics.prefill_tokens == sum(s.num_prompt_tokens for s in sequences)
    assert statistics.decode_tokens == sum(s.num_generated_tokens for s in sequences)
    assert 0 < statistics.peak_kv_blocks <= statistics.num_kv_blocks == 64
    assert statistics.peak_kv_share == statistics.peak_kv_blocks / 64
    assert 0 < statistics.host_seconds <= statistics.seconds
    assert 0 < statistics.mean_seconds_to_first_token < statistics.seconds
    assert statistics.decode_tokens_per_second > 0 < statistics.prefill_tokens_per_second
    assert statistics.host_seconds_per_step == statistics.host_seconds / statistics.steps
    assert statistics.acceptance_rate == 0.0


# Mutants: each breaks one rule and must be seen.


def served_well(toy: Make, sequence_of: Make, expected: Make, **changes: Any) -> bool:
    """Whether heavy traffic comes out right."""
    tight = {"num_blocks": 14, "max_batch_tokens": 24, "prefill_chunk_size": 5} | changes
    try:
        for speculation in (0, 7):
            # The second round meets the blocks that the first has left in the cache.
            served = toy(**tight)
            for _ in range(2):
                sequences = load(sequence_of, speculation=speculation, max_tokens=20)
                served.run(sequences)
                check(sequences, expected)
                check_empty(served)
    except (AssertionError, LookupError):  # the toy model refuses, or finds no such block
        return False
    return True


def test_the_traffic_of_the_mutants_is_served_well(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    assert served_well(toy, sequence_of, expected)


class KeepsExtraRow(Scheduler):
    """Does not notice that a sequence had ended when its last row was launched."""

    def take_in(self, chunks: Any, sampled_rows: Any) -> list[RolloutSequence]:
        for chunk in chunks:
            chunk.sequence.finish_reason = None
        return super().take_in(chunks, sampled_rows)


class SharesTooEarly(BlockManager):
    """Hands out blocks that nobody has launched a step for."""

    def _announce(self, sequence: RolloutSequence, index: int) -> None:
        super()._announce(sequence, index)
        self._blocks[sequence.block_table[index]].computed = True


class CountsGuessesAsComputed(Scheduler):
    """Takes the keys of rejected guesses for good."""

    def mark_launched(self, chunks: Any) -> None:
        super().mark_launched(chunks)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end


class CountsTokensTwice(Scheduler):
    """Counts a step's tokens twice."""

    def mark_launched(self, chunks: Any) -> None:
        super().mark_launched(chunks)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += not chunk.samples


class LosesBlocks(Scheduler):
    """Forgets the last block of a sequence that ends."""

    def finish(self, sequence: RolloutSequence) -> None:
        if len(sequence.block_table) > 1:
            sequence.block_table.pop()
        super().finish(sequence)


class GoesOnBehindADraft(Scheduler):
    """Schedules the token behind a draft as if it were the only pending one."""

    def mark_launched(self, chunks: Any) -> None:
        super().mark_launched(chunks)
        for chunk in chunks:
            chunk.sequence.num_drafted = 0

    def _draft(self, sequence: RolloutSequence, room: int) -> tuple[int, ...] | None:
        return super()._draft(sequence, room) or ()

    @property
    def prefers_report(self) -> bool:
        return False


@pytest.mark.parametrize(
    "mutant",
    [
        {"scheduler": KeepsExtraRow},
        {"blocks": SharesTooEarly},
        {"scheduler": CountsGuessesAsComputed},
        {"scheduler": CountsTokensTwice},
        {"scheduler": LosesBlocks},
        {"scheduler": GoesOnBehindADraft},
    ],
    ids=lambda mutant: next(iter(mutant.values())).__name__,
)
def test_a_broken_rule_is_caught(
    toy: Make, sequence_of: Make, expected: Make, mutant: dict[str, Any]
) -> None:
    assert not served_well(toy, sequence_of, expected, **mutant)


class PublishesEachStep(Scheduler):
    """Asks for the publication of what a step computes as soon as it is launched."""

    def mark_launched(self, chunks: Any) -> None:
        super().mark_launched(chunks)
        for chunk in chunks:
            self._blocks.publish(chunk.sequence)


class NamesPendingTokens(BlockManager):
    """Publishes a block as soon as a step fills it, its last token unknown."""

    def publish(self, sequence: RolloutSequence) -> None:
        known = sequence.token_ids
        missing = sequence.num_computed_tokens - len(known)
        sequence.token_ids = known + [0] * max(missing, 0)
        super().publish(sequence)
        sequence.token_ids = known


@pytest.mark.parametrize("blocks", [BlockManager, NamesPendingTokens])
def test_a_block_named_before_its_last_token_is_known_is_caught(
    toy: Make, sequence_of: Make, expected: Make, blocks: type[BlockManager]
) -> None:
    served = toy(blocks=blocks, scheduler=PublishesEachStep)
    first = sequence_of([3, 4, 5], max_tokens=9, stop=frozenset())
    served.run([first])
    token_ids = expected(first)[0]
    assert token_ids[3] != 0  # the first block ends with it, and is computed before it is known
    later = sequence_of([3, 4, 5, 0, 6], prompt_id=1)
    served.run([later])
    assert (later.token_ids == expected(later)[0]) == (blocks is BlockManager)


@pytest.mark.parametrize("off", [-1, 1])
def test_an_acceptance_rule_off_by_one_is_caught(
    toy: Make,
    sequence_of: Make,
    expected: Make,
    monkeypatch: pytest.MonkeyPatch,
    off: int,
) -> None:
    right = scheduler.num_accepted

    def wrong(draft: Any, sampled: Any) -> int:
        return max(min(right(draft, sampled) + off, len(draft)), 0)

    monkeypatch.setattr(scheduler, "num_accepted", wrong)
    sequences = load(sequence_of, speculation=7, max_tokens=40)
    served = toy()
    served.run(sequences)
    tokens_right = [s.token_ids for s in sequences] == [expected(s)[0] for s in sequences]
    # One token too few is only slower: the next step samples it again, the same.
    assert tokens_right == (off < 0)


def test_a_step_whose_launch_fails_shares_nothing(
    toy: Make, sequence_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = toy()

    def out_of_memory(chunks: list[ScheduledChunk]) -> list[Sampled]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(served.runner, "launch", out_of_memory)
    served.loop.add(sequence_of(PREFIX))
    with pytest.raises(RuntimeError):
        served.loop.step()
    assert served.blocks.match_prefix(sequence_of(PREFIX)).block_ids == []


def test_the_step_launched_beyond_the_last_end_is_taken_in_at_once(
    toy: Make, sequence_of: Make, expected: Make
) -> None:
    free = sequence_of([1, 2, 3], max_tokens=12, stop=frozenset())
    stop = expected(free)[0][7]
    sequence = sequence_of([1, 2, 3], max_tokens=12, stop=frozenset({stop}))
    served = toy()
    served.loop.add(sequence)
    while not served.loop.step():
        pass
    assert sequence.finish_reason == "stop" and not served.loop.has_unfinished
    assert not served.runner.in_flight and served.loop.statistics.discarded_rows == 1


def test_an_abandoned_loop_has_waited_and_holds_nothing(toy: Make, sequence_of: Make) -> None:
    served = toy()
    served.loop.add(sequence_of(PREFIX, max_tokens=9))
    for _ in range(3):
        served.loop.step()
    assert served.runner.in_flight
    served.loop.abandon()
    assert not served.loop.has_unfinished and not served.runner.in_flight
    assert served.blocks.num_free_blocks == served.blocks.num_blocks
    assert served.blocks.match_prefix(sequence_of(PREFIX)).block_ids == []


def test_a_step_that_was_launched_is_not_lost_when_the_report_before_it_fails(
    toy: Make, sequence_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
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
