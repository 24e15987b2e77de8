"""Which tokens of which sequences go into the next step: continuous batching.

**A step** serves the running sequences that decode, oldest first; then continues prefills, oldest
first; then admits waiting sequences, while tokens, seats and blocks last.

**Admission**: preempted sequences first, then those with the most tokens still to generate, so that
no long one decodes alone at the end, then by arrival. An admitted sequence gets blocks for all its
known tokens. One whose prefix another is computing is set aside until that step is launched.

**Preemption**: only decoding can run out of blocks. Then the sequence admitted last gives its
blocks back and waits before all others. It keeps its tokens and logprobs.

**Failure**: a sequence with a logprob that is not finite starts over alone; see `failures`.

**One step ahead**: a step is scheduled before the tokens of the one before are reported. Only a
draft needs to know the last token, so its sequence sits out until the report. No schedule moves a
token's bytes (claim C1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from time import perf_counter

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.drafter import num_accepted
from rl_consistency.rollout.failures import Failures
from rl_consistency.rollout.sequence import RolloutSequence

_SIT_OUT_SHARE = 8  # the loop waits for the report once one in so many would sit out a step

SampledTokens = list[tuple[int, float, *tuple[int, ...]]]
"""Token id, logprob and, in a sparse model, routing at each position a chunk samples at: 1 +
len(draft) of them."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Consecutive tokens of one sequence that the next step computes."""

    sequence: RolloutSequence
    start: int  # position of the first of them in the sequence
    length: int  # known tokens, at most one pending one, then the draft
    samples: bool
    draft: tuple[int, ...] = ()  # guesses behind the last known token; each samples a token more

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """Whether it is the one token left to compute, and the draft behind it."""
        return self.samples and self.length == 1 + len(self.draft)


@dataclass(kw_only=True)
class RolloutStatistics:
    """Counters since the engine last began to work, that is of one `generate` or `stream`."""

    steps: int = 0
    prefill_tokens: int = 0
    """Tokens of prompts computed, and of sequences computed again: preempted or started over."""
    decode_tokens: int = 0  # tokens generated
    prefix_hit_tokens: int = 0  # tokens found in the cache instead of computed
    replayed_prefills: int = 0  # steps whose chunks ran through CUDA graphs of prefill
    preemptions: int = 0
    started_over: int = 0  # sequences computed again alone, since a logprob was not finite
    drafted_tokens: int = 0  # tokens guessed and verified
    accepted_tokens: int = 0  # those of them that were right
    discarded_rows: int = 0  # tokens sampled behind the end of a sample and thrown away
    num_kv_blocks: int = 0
    peak_kv_blocks: int = 0  # most blocks held by running sequences at a time
    seconds: float = 0.0  # from the first request to the last step
    host_seconds: float = 0.0
    """Part of `seconds` in which the host does not wait for the device; on a CPU with the model."""
    first_tokens: int = 0  # samples whose first token was reported
    first_token_seconds: float = 0.0
    """Sum over these samples, each from its submission to its first token."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Speed over all of `seconds`, decoding included: not the speed of prefill alone."""
        return _ratio(self.prefill_tokens, self.seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed over all of `seconds`, prefill included: not the speed of decoding alone."""
        return _ratio(self.decode_tokens, self.seconds)

    @property
    def mean_seconds_to_first_token(self) -> float:
        return _ratio(self.first_token_seconds, self.first_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were right; 0 without drafts."""
        return _ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def peak_kv_share(self) -> float:
        return _ratio(self.peak_kv_blocks, self.num_kv_blocks)

    @property
    def host_seconds_per_step(self) -> float:
        return _ratio(self.host_seconds, self.steps)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


class Scheduler:
    """Keeps the waiting and the running sequences and cuts steps from them.

    For each step: `schedule`, launch its chunks, `mark_launched`; later `take_in` what it sampled.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        prefill_chunk_size: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._prefill_chunk_size = prefill_chunk_size or max_batch_tokens
        self._waiting: list[tuple[bool, int, int, RolloutSequence]] = []
        self._set_aside: dict[int, list[RolloutSequence]] = {}  # by the block they wait for
        self._running: list[RolloutSequence] = []  # in order of admission
        self._failures = Failures()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self.admitted: list[RolloutSequence] = []  # given a slot by the last `schedule`
        self.statistics = RolloutStatistics(num_kv_blocks=blocks.num_blocks)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running) or any(self._set_aside.values())

    @property
    def prefers_report(self) -> bool:
        """Whether too many running sequences would sit out the next step to draft after the report:
        to wait for it costs all of them a small part of a step."""
        sitting_out = sum(
            s.num_drafted > 0 or (s.num_pending > 0 and s.speculator.length(s.num_tokens + 1) > 0)
            for s in self._running
            if s.speculator is not None
        )
        return sitting_out > 0 and sitting_out * _SIT_OUT_SHARE >= len(self._running)

    def add(self, sequence: RolloutSequence) -> None:
        """Queue a sequence that the whole cache can hold (`Requests` checks that)."""
        sequence.submitted_at, sequence.arrival = perf_counter(), self._num_arrived
        self._num_arrived += 1
        self._queue(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks; none when all is finished, or waits for the step in flight."""
        self.admitted, num_preemptions = [], self.statistics.preemptions
        chunks, prefills, room = self._decode_chunks()
        num_decodes = len(chunks)
        for sequence in prefills:
            if room > 0 and sequence.slot is not None:
                chunks.append(self._prefill_chunk(sequence, room))
                room -= chunks[-1].length
        # Blocks that a preemption just freed are needed by those that run.
        if self.statistics.preemptions == num_preemptions:
            chunks += self._admitted_chunks(room)
        self.statistics.prefill_tokens += sum(chunk.length for chunk in chunks[num_decodes:])
        return chunks

    def mark_launched(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Record that the step is under way which writes the chunks' keys and values."""
        statistics, in_use = self.statistics, self._blocks.num_blocks - self._blocks.num_free_blocks
        statistics.steps += 1
        statistics.peak_kv_blocks = max(statistics.peak_kv_blocks, in_use)
        for chunk in chunks:
            sequence = chunk.sequence
            # Whether a guess holds is not known: it does not count as computed yet.
            sequence.num_computed_tokens = chunk.start + chunk.length - len(chunk.draft)
            if chunk.samples:
                sequence.num_pending += 1
                sequence.num_drafted = len(chunk.draft)
            # The one token of a decode is known, and can fill a block, only when it is reported.
            if chunk.length > 1 or not chunk.samples:
                self._blocks.publish(sequence)

    def take_in(
        self, chunks: Sequence[ScheduledChunk], sampled_rows: Sequence[SampledTokens]
    ) -> list[RolloutSequence]:
        """Append what a launched step sampled for its chunks; returns the sequences that ended."""
        ended: list[RolloutSequence] = []
        statistics, now = self.statistics, perf_counter()
        for chunk, sampled in zip(chunks, sampled_rows, strict=True):
            sequence = chunk.sequence
            if sequence.num_void:
                sequence.num_void -= 1
                statistics.discarded_rows += len(sampled)
                continue
            sequence.num_pending -= 1
            if sequence.is_finished:  # before this step's tokens: it ran once too often
                statistics.discarded_rows += len(sampled)
                continue
            known = len(sequence.token_ids)
            if chunk.draft:
                self._append_behind_draft(chunk, sampled)
            else:
                sequence.append(*sampled[0])
            num_tokens = len(sequence.token_ids)
            statistics.decode_tokens += num_tokens - known
            if sequence.error is not None:
                self._blocks.distrust(sequence)
                alone = not sequence.num_borrowed_blocks and not chunk.draft
                if self._failures.may_pass_alone(sequence, alone=alone):
                    self._start_over(sequence)
                    continue
            if known == sequence.num_prompt_tokens:
                statistics.first_tokens += 1
                statistics.first_token_seconds += now - sequence.submitted_at
            if sequence.is_finished:
                self.finish(sequence)
                ended.append(sequence)
            elif num_tokens // self._blocks.block_size > sequence.num_published_blocks:
                self._blocks.publish(sequence)
        return ended

    def _append_behind_draft(self, chunk: ScheduledChunk, sampled: SampledTokens) -> None:
        """Keep the first sampled token, and each further one whose guess before it was right."""
        sequence, draft, known = chunk.sequence, chunk.draft, chunk.sequence.num_tokens
        accepted = num_accepted(draft, [token_id for token_id, *_ in sampled])
        for row in sampled[: 1 + accepted]:
            sequence.append(*row)
            if sequence.is_finished:
                break
        sequence.num_drafted = 0
        if sequence.slot is not None:  # else it was preempted: nothing is computed
            # The keys of the guesses kept, behind the last token known before, are computed too.
            sequence.num_computed_tokens += max(sequence.num_tokens - known - 1, 0)
        if sequence.speculator is not None:
            sequence.speculator.observe(sequence.num_tokens, len(draft), accepted)
        self.statistics.drafted_tokens += len(draft)
        self.statistics.accepted_tokens += accepted

    def finish(self, sequence: RolloutSequence) -> None:
        """Retire a sequence that ended, wherever it is, and take its blocks back at once."""
        if sequence.slot is None:
            self._waiting = [entry for entry in self._waiting if entry[-1] is not sequence]
            heapify(self._waiting)
            for others in self._set_aside.values():
                others[:] = [other for other in others if other is not sequence]
            return
        if sequence.error is None:
            self._blocks.publish(sequence)
        self._unseat(sequence)

    def _start_over(self, sequence: RolloutSequence) -> None:
        """Queue a sequence that failed, its tokens kept, to compute them from blocks of its own."""
        self.statistics.started_over += 1
        sequence.finish_reason = sequence.error = sequence.speculator = None
        sequence.alone = True
        sequence.num_void, sequence.num_pending, sequence.num_drafted = sequence.num_pending, 0, 0
        if sequence.slot is not None:  # else it was preempted meanwhile, and waits
            self._send_back(sequence)

    def _send_back(self, sequence: RolloutSequence) -> None:
        """Queue a running sequence before all others."""
        self._unseat(sequence)
        sequence.preempted = True
        self._queue(sequence)

    def _unseat(self, sequence: RolloutSequence) -> None:
        """Take a running sequence's blocks and slot; none of its tokens counts as computed."""
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._blocks.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.num_computed_tokens = 0

    def _decode_chunks(self) -> tuple[list[ScheduledChunk], list[RolloutSequence], int]:
        """The decode chunks, the sequences in prefill, and the tokens left."""
        chunks: list[ScheduledChunk] = []
        prefills: list[RolloutSequence] = []
        room, size = self._max_batch_tokens, self._blocks.block_size
        # Preemption shortens the list from its end, never before the sequence at hand.
        for place, sequence in enumerate(self._running):
            end = len(sequence.token_ids) + sequence.num_pending
            start = sequence.num_computed_tokens
            if end - start > 1 or start < sequence.num_prompt_tokens:
                prefills.append(sequence)
                continue
            if end == sequence.max_num_tokens or sequence.num_drafted:
                continue  # the report ends it, or tells how much of the draft holds
            if room <= 0:
                break
            # Those behind it get a token each, or they would hold their blocks for nothing.
            behind = len(self._running) - 1 - place
            draft = self._draft(sequence, room - behind)
            if draft is None:
                continue
            if end > len(sequence.block_table) * size and not self._make_room(sequence):
                continue
            if draft and not self._blocks.grow(sequence, len(draft)):
                draft = ()
            chunks.append(ScheduledChunk(sequence, start, 1 + len(draft), True, draft))
            room -= 1 + len(draft)
        return chunks, prefills, room

    def _draft(self, sequence: RolloutSequence, room: int) -> tuple[int, ...] | None:
        """Guesses to verify in this step; None where the last token has to be known first."""
        if (speculator := sequence.speculator) is None:
            return ()
        end = sequence.num_scheduled_tokens
        # The token sampled behind the last guess must still be within the sample.
        most = min(speculator.length(end), sequence.max_num_tokens - end - 1, room - 1)
        if most <= 0:
            return ()
        return None if sequence.num_pending else speculator.propose(sequence.token_ids, most)

    def _make_room(self, sequence: RolloutSequence) -> bool:
        """Get a place for the sequence's last token: while blocks are missing, the sequence
        admitted last is preempted. False if that was the sequence itself."""
        while sequence.slot is not None and not self._blocks.grow(sequence):
            self._preempt(self._running[-1])
        return sequence.slot is not None

    def _preempt(self, sequence: RolloutSequence) -> None:
        self._send_back(sequence)
        self.statistics.preemptions += 1

    def _prefill_chunk(self, sequence: RolloutSequence, room: int) -> ScheduledChunk:
        uncomputed = sequence.num_uncomputed_tokens
        length = min(uncomputed, self._prefill_chunk_size, room)
        return ScheduledChunk(sequence, sequence.num_computed_tokens, length, length == uncomputed)

    def _queue(self, sequence: RolloutSequence) -> None:
        remaining = sequence.max_num_tokens - sequence.num_tokens
        heappush(self._waiting, (not sequence.preempted, -remaining, sequence.arrival, sequence))

    def _admitted_chunks(self, room: int) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        # Those set aside come back once their block is computed, or given up.
        for block_id in [b for b in self._set_aside if not self._blocks.is_awaited(b)]:
            for sequence in self._set_aside.pop(block_id):
                self._queue(sequence)
        # No more run than can all decode in one step.
        seats = self._max_batch_tokens - len(self._running)
        while self._waiting and room > 0 and self._free_slots and len(chunks) < seats:
            sequence = self._waiting[0][-1]
            match = self._blocks.match_prefix(sequence)
            if match.awaited_block is not None:
                heappop(self._waiting)
                self._set_aside.setdefault(match.awaited_block, []).append(sequence)
                continue
            # Those running can then still grow by a block each before one has to be preempted.
            if not self._blocks.allocate(sequence, match, spare=len(self._running)):
                break
            heappop(self._waiting)
            sequence.num_computed_tokens = len(match.block_ids) * self._blocks.block_size
            self.statistics.prefix_hit_tokens += sequence.num_computed_tokens
            sequence.slot = self._free_slots.pop()
            self._running.append(sequence)
            self.admitted.append(sequence)
            chunks.append(self._prefill_chunk(sequence, room))
            room -= chunks[-1].length
        return chunks
