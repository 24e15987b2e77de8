"""The engine's loop: it runs one step ahead of the tokens it knows.

A step is scheduled and launched before the tokens of the step before are reported, so the device
never waits for the host. All about it but the value of the last token is known by then, and that
the runner keeps on the device. A sequence that turns out to have ended has run once too often; that
row is thrown away, and no other row's bytes knew of it (claim C1). On a CPU a launch computes at
once, and everything else is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.drafter import num_accepted
from rl_consistency.rollout.scheduler import ScheduledChunk, Scheduler
from rl_consistency.rollout.sequence import RolloutSequence
from rl_consistency.rollout.statistics import RolloutStatistics

Sampled = list[tuple[int, float]]
"""Token id and logprob at each position a chunk samples at: 1 + len(draft) of them."""


class LaunchedStep(Protocol):
    """A step queued on the device."""

    @property
    def chunks(self) -> Sequence[ScheduledChunk]:
        """Those that sample, in order."""
        ...

    def wait(self) -> list[Sampled]:
        """What was sampled for each of them; waits for the device."""
        ...


class StepRunner(Protocol):
    """Runs the model: `ModelRunner`."""

    def admit(self, sequence: RolloutSequence) -> None:
        """Write the sequence's sampling parameters to the device state of its slot."""
        ...

    def launch(self, chunks: Sequence[ScheduledChunk]) -> LaunchedStep:
        """Queue a step; never waits for the device."""
        ...


class StepLoop:
    """Serves sequences, step by step."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, blocks: BlockManager) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._in_flight: LaunchedStep | None = None
        self._has_begun = self._is_abandoned = False
        self._started = perf_counter()
        self._seconds = self._host_seconds = self._waited = 0.0
        self._num_steps = 0
        self._num_tokens = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._num_discarded = 0
        self._peak_blocks = 0
        self._first_token_seconds = 0.0
        self._num_first_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to step for, be it only a report."""
        if self._is_abandoned:
            return False
        return self._scheduler.has_unfinished or self._in_flight is not None

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return self._num_tokens

    def add(self, sequence: RolloutSequence) -> None:
        """Queue a sequence."""
        sequence.submitted_at = perf_counter()
        self._scheduler.add(sequence)

    def cancel(self, sequence: RolloutSequence) -> None:
        """End an unfinished sequence; its blocks are free at once."""
        sequence.finish("cancelled")
        self._scheduler.finish(sequence)

    def step(self) -> list[RolloutSequence]:
        """Launch the next step, then take in the one before; returns the sequences that ended.

        After an exception of any kind nothing is left to do but to `abandon` the loop.
        """
        self._has_begun = True
        began, waited = perf_counter(), self._waited
        finished: list[RolloutSequence] = []
        if self._in_flight is not None and self._scheduler.prefers_report:
            finished += self._take_in()
        launched = self._launch()
        try:
            finished += self._take_in()
        finally:
            self._in_flight = launched
        if not self._scheduler.has_unfinished:  # what is in flight ran once too often
            finished += self._take_in()
        self._seconds = perf_counter() - self._started
        self._host_seconds += perf_counter() - began - (self._waited - waited)
        return finished

    def forget(self) -> None:
        """Drop all cached keys, unless no step began; no sequence may hold any."""
        if self._has_begun:
            self._blocks.reset()

    def abandon(self) -> None:
        """Leave every sequence as it is and take all blocks back; the loop serves nobody any more.

        Waits for the step in flight. Right in whatever state an exception left the loop.
        """
        self._is_abandoned = True
        self.forget()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.wait()

    def statistics(self) -> RolloutStatistics:
        """Of all steps so far."""
        return RolloutStatistics(
            steps=self._num_steps,
            prefill_tokens=self._scheduler.num_prefill_tokens,
            decode_tokens=self._num_tokens,
            prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            preemptions=self._scheduler.num_preemptions,
            drafted_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
            discarded_rows=self._num_discarded,
            num_kv_blocks=self._blocks.num_blocks,
            peak_kv_blocks=self._peak_blocks,
            seconds=self._seconds,
            host_seconds=self._host_seconds,
            mean_seconds_to_first_token=self._first_token_seconds / max(self._num_first_tokens, 1),
        )

    def _launch(self) -> LaunchedStep | None:
        chunks = self._scheduler.schedule()
        if not chunks:
            assert self._in_flight is not None or not self._scheduler.has_unfinished
            return None
        for sequence in self._scheduler.admitted:
            self._runner.admit(sequence)
        launched = self._runner.launch(chunks)
        # Not before the launch succeeded: nothing may be shared that no step writes.
        self._scheduler.mark_launched(chunks)
        self._num_steps += 1
        in_use = self._blocks.num_blocks - self._blocks.num_free_blocks
        self._peak_blocks = max(self._peak_blocks, in_use)
        return launched

    def _take_in(self) -> list[RolloutSequence]:
        """Append what the step in flight sampled; returns the sequences that it ended."""
        if self._in_flight is None:
            return []
        in_flight, self._in_flight = self._in_flight, None
        before = perf_counter()
        sampled_rows = in_flight.wait()
        now = perf_counter()
        self._waited += now - before
        finished: list[RolloutSequence] = []
        for chunk, sampled in zip(in_flight.chunks, sampled_rows, strict=True):
            sequence = chunk.sequence
            sequence.num_pending -= 1
            if sequence.is_finished:  # before this step's tokens: it ran once too often
                self._num_discarded += len(sampled)
                continue
            known = len(sequence.token_ids)
            if chunk.draft:
                self._take_in_draft(chunk, sampled)
            else:
                sequence.append(*sampled[0])
            num_tokens = len(sequence.token_ids)
            self._num_tokens += num_tokens - known
            if known == sequence.num_prompt_tokens:
                self._first_token_seconds += now - sequence.submitted_at
                self._num_first_tokens += 1
            if sequence.is_finished:
                self._scheduler.finish(sequence)
                finished.append(sequence)
            elif num_tokens // self._blocks.block_size > sequence.num_published_blocks:
                self._blocks.publish(sequence)
        return finished

    def _take_in_draft(self, chunk: ScheduledChunk, sampled: Sampled) -> None:
        """Keep the first sampled token, and each further one whose guess before it was right."""
        sequence, known = chunk.sequence, chunk.sequence.num_tokens
        accepted = num_accepted(chunk.draft, [token_id for token_id, _ in sampled])
        for token_id, logprob in sampled[: 1 + accepted]:
            sequence.append(token_id, logprob)
            if sequence.is_finished:
                break
        sequence.num_drafted = 0
        if sequence.slot is not None:  # else preempted meanwhile: nothing of it is computed
            # The keys of the guesses kept, behind the last token known before, are computed too.
            sequence.num_computed_tokens += max(sequence.num_tokens - known - 1, 0)
        if sequence.speculator is not None:
            sequence.speculator.observe(sequence.num_tokens, len(chunk.draft), accepted)
        self._num_drafted += len(chunk.draft)
        self._num_accepted += accepted
