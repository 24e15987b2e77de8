"""The scheduler serves every sequence whatever the limits, and tokens do not depend on them."""

from __future__ import annotations

import pytest

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import ScheduledChunk, Scheduler
from rl_consistency.rollout.sequence import RolloutSequence, SequenceStatus

SIZE = 4


class FakeRunner:
    """A model whose cache entry of a token is the token's whole prefix.

    It refuses to read an entry that is not the sequence's own, and predicts the next token from
    the entries it reads: a wrong slot, a stale block or a gap shows at once.
    """

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, chunks: list[ScheduledChunk]) -> list[int]:
        for chunk in chunks:
            for position in range(chunk.start):
                assert self.slots[self._slot(chunk, position)] == self._prefix(chunk, position)
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                self.slots[self._slot(chunk, position)] = self._prefix(chunk, position)
        return [hash(tuple(c.sequence.token_ids)) % 89 for c in chunks if c.samples]

    def _slot(self, chunk: ScheduledChunk, position: int) -> tuple[int, int]:
        return chunk.sequence.block_table[position // SIZE], position % SIZE

    def _prefix(self, chunk: ScheduledChunk, position: int) -> tuple[int, ...]:
        return tuple(chunk.sequence.token_ids[: position + 1])


def make(prompt: list[int], *, max_tokens: int = 6, sample_index: int = 0) -> RolloutSequence:
    return RolloutSequence(
        prompt_index=0,
        sample_index=sample_index,
        prompt_id=0,
        params=SamplingParams(max_tokens=max_tokens),
        stop_token_ids=frozenset({88}),
        token_ids=prompt,
    )


def scheduler_of(
    num_blocks: int = 64,
    *,
    max_batch_tokens: int = 64,
    max_num_seqs: int = 16,
    prefill_chunk_size: int | None = None,
    share_prefixes: bool = True,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, SIZE, share_prefixes=share_prefixes),
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=prefill_chunk_size,
    )


def step(scheduler: Scheduler, runner: FakeRunner) -> list[ScheduledChunk]:
    chunks = scheduler.schedule()
    tokens = runner.run(chunks)
    scheduler.mark_computed(chunks)
    for chunk, token in zip([c for c in chunks if c.samples], tokens, strict=True):
        chunk.sequence.append(token, -1.0)
        if chunk.sequence.is_finished:
            scheduler.finish(chunk.sequence)
    return chunks


def run_all(scheduler: Scheduler, sequences: list[RolloutSequence]) -> list[list[int]]:
    runner = FakeRunner()
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(10_000):
        if not scheduler.has_unfinished:
            return [sequence.token_ids for sequence in sequences]
        step(scheduler, runner)
    raise AssertionError("the scheduler makes no progress")


def group_load() -> list[RolloutSequence]:
    prompts = [[1, 2, 3] * 4, [1, 2, 3] * 4 + [5], [7], [9] * 17]
    return [
        make(prompt, max_tokens=3 + 4 * sample_index, sample_index=sample_index)
        for prompt in prompts
        for sample_index in range(4)
    ]


def alone() -> list[list[int]]:
    return [run_all(scheduler_of(), [sequence])[0] for sequence in group_load()]


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 11, 20, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
@pytest.mark.parametrize(("max_batch_tokens", "chunk"), [(1, None), (7, 3), (64, 7), (64, None)])
def test_every_limit_gives_the_tokens_of_a_run_alone(
    max_batch_tokens: int,
    chunk: int | None,
    max_num_seqs: int,
    num_blocks: int,
    share_prefixes: bool,
) -> None:
    scheduler = scheduler_of(
        num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
        share_prefixes=share_prefixes,
    )
    assert run_all(scheduler, group_load()) == alone()


def test_limits_hold_in_every_step() -> None:
    scheduler = scheduler_of(max_batch_tokens=9, max_num_seqs=3, prefill_chunk_size=5)
    runner = FakeRunner()
    for sequence in group_load():
        scheduler.add(sequence)
    while scheduler.has_unfinished:
        chunks = step(scheduler, runner)
        assert 0 < sum(chunk.length for chunk in chunks) <= 9
        assert len(chunks) <= 3 and all(chunk.length <= 5 for chunk in chunks)


def test_decoding_comes_before_prefill() -> None:
    scheduler, runner = scheduler_of(max_batch_tokens=6), FakeRunner()
    scheduler.add(make([1, 2, 3]))
    step(scheduler, runner)
    scheduler.add(make([4] * 20))
    chunks = step(scheduler, runner)
    assert [chunk.length for chunk in chunks] == [1, 5]
    assert [chunk.samples for chunk in chunks] == [True, False]


def test_only_the_last_known_token_is_sampled_from() -> None:
    scheduler, runner = scheduler_of(prefill_chunk_size=4), FakeRunner()
    sequence = make([1] * 10, max_tokens=2)
    scheduler.add(sequence)
    counts = []
    while scheduler.has_unfinished:
        step(scheduler, runner)
        counts.append(sequence.num_generated_tokens)
    assert counts == [0, 0, 1, 2]


def test_siblings_of_a_group_find_the_prompt_in_the_cache() -> None:
    scheduler, runner = scheduler_of(prefill_chunk_size=6), FakeRunner()
    group = [make([1] * 13, sample_index=i) for i in range(4)]
    for sequence in group:
        scheduler.add(sequence)
    steps = [[chunk.length for chunk in step(scheduler, runner)] for _ in range(3)]
    # The first sample computes the three full blocks alone; then each computes its last token.
    assert steps == [[6], [6], [1, 1, 1, 1]]
    assert scheduler.num_prefix_hit_tokens == 3 * 12


def test_other_prompts_overtake_siblings_that_wait() -> None:
    scheduler, runner = scheduler_of(), FakeRunner()
    first, sibling, other = make([1] * 9), make([1] * 9), make([2] * 9)
    for sequence in (first, sibling, other):
        scheduler.add(sequence)
    assert [chunk.sequence for chunk in step(scheduler, runner)] == [first, other]
    assert [c.sequence for c in step(scheduler, runner)] == [first, other, sibling]


def test_the_most_recently_admitted_sequence_is_preempted_and_keeps_its_tokens() -> None:
    scheduler, runner = scheduler_of(4), FakeRunner()
    old, new = make([1] * 7, max_tokens=8), make([2] * 7, max_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    step(scheduler, runner)
    step(scheduler, runner)
    generated = list(new.token_ids)
    assert step(scheduler, runner)[0].sequence is old
    assert scheduler.num_preemptions == 1
    assert new.status is SequenceStatus.WAITING and old.status is SequenceStatus.RUNNING
    assert new.token_ids == generated and len(new.token_logprobs) == 2
    assert (new.block_table, new.num_computed_tokens) == ([], 0)
    while scheduler.has_unfinished:
        step(scheduler, runner)
    assert new.token_ids[:9] == generated and len(new.token_logprobs) == new.num_generated_tokens


def test_preempted_sequences_come_back_in_order() -> None:
    scheduler, runner = scheduler_of(6, share_prefixes=False), FakeRunner()
    sequences = [make([i] * 7, max_tokens=16) for i in (1, 2, 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    admitted: list[RolloutSequence] = []
    while scheduler.has_unfinished:
        for chunk in step(scheduler, runner):
            if chunk.start == 0 and chunk.sequence.num_generated_tokens > 1:
                admitted.append(chunk.sequence)
    assert scheduler.num_preemptions >= 2
    assert admitted[0] is sequences[1]


def test_the_schedule_is_the_same_every_time() -> None:
    def record() -> list[list[tuple[int, int, int]]]:
        scheduler, runner = scheduler_of(11, max_batch_tokens=9), FakeRunner()
        sequences = group_load()
        for sequence in sequences:
            scheduler.add(sequence)
        steps = []
        while scheduler.has_unfinished:
            chunks = step(scheduler, runner)
            steps.append([(sequences.index(c.sequence), c.start, c.length) for c in chunks])
        return steps

    assert record() == record()


def test_a_finished_sequence_gives_its_blocks_back() -> None:
    blocks = BlockManager(8, SIZE)
    scheduler = Scheduler(blocks, max_batch_tokens=64, max_num_seqs=4)
    run_all(scheduler, [make([i] * 5) for i in range(4)])
    assert blocks.num_free_blocks == 8


def test_a_sequence_the_whole_cache_cannot_hold_is_refused() -> None:
    scheduler = scheduler_of(3)
    scheduler.add(make([1] * 7, max_tokens=6))  # 12 cached tokens: exactly 3 blocks
    with pytest.raises(ValueError, match="may need 4 KV blocks"):
        scheduler.add(make([1] * 7, max_tokens=7))
