"""The loop of steps: schedule, launch, and take in the step before.

A step is launched before the tokens of the step before are reported, so the device never waits for
the host. Only the value of each sequence's last token is unknown then, and the runner keeps that on
the device. A sequence that turns out to have ended has run once too often; that row is thrown away,
and it moved no byte of another row (claim C1). On a CPU a launch computes at once.
"""

from __future__ import annotations

from time import perf_counter

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.device.model_runner import ModelRunner, PendingStep
from rl_consistency.rollout.scheduler import Scheduler
from rl_consistency.rollout.sequence import RolloutSequence


class StepLoop:
    """Serves the sequences of one rollout, step by step."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, blocks: BlockManager) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._in_flight: PendingStep | None = None
        self._has_begun = self._is_abandoned = False
        self._started = perf_counter()
        self._waited = 0.0
        self.statistics = scheduler.statistics

    @property
    def has_unfinished(self) -> bool:
        """Whether a step is left to launch or to take in."""
        left = self._scheduler.has_unfinished or self._in_flight is not None
        return left and not self._is_abandoned

    def add(self, sequence: RolloutSequence) -> None:
        sequence.submitted_at = perf_counter()
        self._scheduler.add(sequence)

    def cancel(self, sequence: RolloutSequence) -> None:
        """End an unfinished sequence; its blocks are free at once."""
        sequence.finish("cancelled")
        self._scheduler.finish(sequence)

    def step(self) -> list[RolloutSequence]:
        """Launch the next step, then take in the one before; returns the sequences that ended."""
        self._has_begun = True
        began, waited = perf_counter(), self._waited
        ended: list[RolloutSequence] = []
        if self._scheduler.prefers_report:
            ended += self._take_in()
        launched = self._launch()
        try:
            ended += self._take_in()
        finally:
            self._in_flight = launched
        if not self._scheduler.has_unfinished:  # the step in flight ran once too often
            ended += self._take_in()
        now = perf_counter()
        self.statistics.seconds = now - self._started
        self.statistics.host_seconds += now - began - (self._waited - waited)
        return ended

    def _launch(self) -> PendingStep | None:
        chunks = self._scheduler.schedule()
        if not chunks:
            assert self._in_flight is not None or not self._scheduler.has_unfinished
            return None
        for sequence in self._scheduler.admitted:
            self._runner.admit(sequence)
        launched = self._runner.launch(chunks)
        # Not before the launch succeeded: no block may be shared that no step writes.
        self._scheduler.mark_launched(chunks)
        statistics, blocks = self.statistics, self._blocks
        statistics.steps += 1
        statistics.replayed_prefills += launched.replayed_prefill
        in_use = blocks.num_blocks - blocks.num_free_blocks
        statistics.peak_kv_blocks = max(statistics.peak_kv_blocks, in_use)
        return launched

    def _take_in(self) -> list[RolloutSequence]:
        """Wait for the step in flight, if any; returns the sequences that it ended."""
        if self._in_flight is None:
            return []
        in_flight, self._in_flight = self._in_flight, None
        before = perf_counter()
        sampled = in_flight.wait()
        now = perf_counter()
        self._waited += now - before
        ended = self._scheduler.take_in(in_flight.chunks, sampled)
        for sequence in self._scheduler.started:
            self.statistics.first_tokens += 1
            self.statistics.first_token_seconds += now - sequence.submitted_at
        return ended

    def forget(self) -> None:
        """Drop all cached keys, unless no step began; no sequence may hold any."""
        if self._has_begun:
            self._blocks.reset()

    def abandon(self) -> None:
        """Take all blocks back and wait for the step in flight, in any state of the loop."""
        self._is_abandoned = True
        self.forget()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.wait()
