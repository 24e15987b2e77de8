"""Which tokens of which sequences go into the next call: continuous batching.

A step serves the running sequences that decode, oldest first; then continues prefills, oldest
first; then admits waiting ones, while tokens, seats and blocks last. A sequence gets blocks for all
its known tokens when it is admitted, so only decoding can run out of them. Then the sequence
admitted last gives its blocks back and waits at the head of the queue. It keeps its tokens and
logprobs; once admitted again it computes the keys and values of all of them before it samples on.

A waiting sequence whose prefix is being computed by another is passed over until that is done:
thus the siblings of a GRPO group find the prompt in the cache. Nothing here looks at a clock or a
random number; and whatever it decides, no token's bytes depend on it (claim C1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rl_consistency.rollout.block_manager import BlockManager, PrefixMatch
from rl_consistency.rollout.sequence import RolloutSequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Consecutive tokens of one sequence that the next call computes."""

    sequence: RolloutSequence
    start: int
    """Position of the first of them, counted from the sequence's first token."""
    length: int
    samples: bool
    """Whether the chunk ends with the last known token, the one to sample from."""

    @classmethod
    def next_of(cls, sequence: RolloutSequence, length: int) -> ScheduledChunk:
        """The first `length` tokens that are not computed yet."""
        samples = length == sequence.num_uncomputed_tokens
        return cls(sequence, sequence.num_computed_tokens, length, samples)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """Whether it is one generated token, the last that was sampled."""
        return self.samples and self.length == 1 and self.start >= self.sequence.num_prompt_tokens


class Scheduler:
    """Keeps the waiting and the running sequences and cuts batches from them."""

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
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk_size = prefill_chunk_size or max_batch_tokens
        self._waiting: deque[RolloutSequence] = deque()
        self._running: list[RolloutSequence] = []  # in order of admission
        self._awaited: dict[RolloutSequence, int] = {}  # waiting sequence -> block it waits for
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: RolloutSequence) -> None:
        """Queue a sequence; ValueError if the whole cache could not hold it."""
        needed = self._blocks.blocks_for(sequence.max_cached_tokens)
        if needed > self._blocks.num_blocks:
            raise ValueError(
                f"the sequence may need {needed} KV blocks of {self._blocks.block_size} tokens "
                f"and the cache has {self._blocks.num_blocks}"
            )
        self._waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """The next call's chunks, at most `max_batch_tokens` tokens; empty when all is finished."""
        num_preemptions = self.num_preemptions
        chunks = self._decode_chunks()
        room = self._max_batch_tokens - len(chunks)
        for sequence in self._running:
            if room > 0 and sequence.num_uncomputed_tokens > 1:
                chunks.append(self._prefill_chunk(sequence, room))
                room -= chunks[-1].length
        if self.num_preemptions == num_preemptions:  # else the blocks just freed are spoken for
            chunks += self._admitted_chunks(room)
        assert chunks or not self.has_unfinished, "unfinished sequences and nothing to run"
        num_decode_tokens = sum(chunk.is_decode for chunk in chunks)
        self.num_decode_tokens += num_decode_tokens
        self.num_prefill_tokens += sum(chunk.length for chunk in chunks) - num_decode_tokens
        return chunks

    def mark_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Record that the call has written the chunks' keys and values."""
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            self._blocks.publish(chunk.sequence)

    def finish(self, sequence: RolloutSequence) -> None:
        """Retire a finished sequence and take its blocks back."""
        self._running.remove(sequence)
        self._blocks.release(sequence)

    def _decode_chunks(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        index = 0
        # Preemption shortens the list from its end, never before `index`.
        while index < len(self._running) and len(chunks) < self._max_batch_tokens:
            sequence = self._running[index]
            if sequence.num_uncomputed_tokens == 1 and self._make_room(sequence):
                chunks.append(ScheduledChunk.next_of(sequence, 1))
            index += 1
        return chunks

    def _make_room(self, sequence: RolloutSequence) -> bool:
        """Get a slot for the sequence's last token; False if it had to give way itself."""
        while not self._blocks.grow(sequence):
            youngest = self._running.pop()
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: RolloutSequence) -> None:
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _prefill_chunk(self, sequence: RolloutSequence, room: int) -> ScheduledChunk:
        length = min(sequence.num_uncomputed_tokens, self._prefill_chunk_size, room)
        return ScheduledChunk.next_of(sequence, length)

    def _admitted_chunks(self, room: int) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        passed_over: list[RolloutSequence] = []
        while self._waiting and room > 0 and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            match = self._match(sequence)
            if match is None:
                passed_over.append(self._waiting.popleft())
                continue
            if not self._blocks.allocate(sequence, match):
                break
            self._waiting.popleft()
            self._admit(sequence)
            chunks.append(self._prefill_chunk(sequence, room))
            room -= chunks[-1].length
        self._waiting.extendleft(reversed(passed_over))
        return chunks

    def _match(self, sequence: RolloutSequence) -> PrefixMatch | None:
        """The cached prefix; None while another sequence is computing the next block of it."""
        awaited = self._awaited.get(sequence)
        if awaited is not None and self._blocks.is_awaited(awaited):
            return None
        match = self._blocks.match_prefix(sequence)
        if match.awaited_block is None:
            return match
        self._awaited[sequence] = match.awaited_block
        return None

    def _admit(self, sequence: RolloutSequence) -> None:
        self._awaited.pop(sequence, None)
        self.num_prefix_hit_tokens += sequence.num_computed_tokens
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
