"""A toy model that runs on the host behind the interface of the model runner.

Its cache entry of a token is a number made of the token's whole prefix, and the next token is drawn
from the sum of all entries it reads: a wrong slot, a stale block, a gap or a neighbour's token
shows at once. `expected` draws the same tokens without a cache, a batch or an engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.drafter import PromptLookupDrafter, Speculator
from rl_consistency.rollout.engine import StepLoop
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import SampledTokens, ScheduledChunk, Scheduler
from rl_consistency.rollout.sequence import RolloutSequence

VOCAB = 13
STOP = 12
PREFIX = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3]
_WORD = 2**61 - 1
_GARBAGE = 987_654_321  # what a slot holds before it is written


def entry_of(before, token_id):
    return hash((before, token_id)) & _WORD


def draw(total, token_id, sequence, position):
    """The token at `position`: mostly a function of the last, so that guesses are often right."""
    stream = (sequence.params.seed, sequence.prompt_id, sequence.sample_index, position)
    number = hash((total, stream)) & _WORD
    drawn = (3 * token_id + 1) % VOCAB if number % 8 else (number >> 8) % VOCAB
    return drawn, -((number >> 16) % 4096) / 4096


def expected(sequence):
    """What the sequence generates, from its prompt alone."""
    token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
    logprobs = []
    entry = total = 0
    for token_id in token_ids:
        entry = entry_of(entry, token_id)
        total += entry
    while len(token_ids) < sequence.max_num_tokens:
        token_id, logprob = draw(total, token_ids[-1], sequence, len(token_ids))
        token_ids.append(token_id)
        logprobs.append(logprob)
        if token_id in sequence.stop_token_ids:
            break
        entry = entry_of(entry, token_id)
        total += entry
    return token_ids, logprobs


@dataclass(eq=False)
class ToyStep:
    """A launched step. It is computed already; `wait` gives its tokens."""

    runner: ToyRunner
    chunks: list[ScheduledChunk]
    sampled: list[SampledTokens]
    replayed_prefill, is_busy = False, None

    def wait(self):
        assert self.runner.in_flight.pop(0) is self, "steps are waited for once, in order"
        self.runner.events.append("wait")
        return self.sampled


@dataclass(eq=False)
class ToyRunner:
    """Launches steps of the toy model. It refuses what the real runner could not do."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    fails_at: frozenset[tuple[int, int]] = frozenset()
    """(prompt id, position) where the logprob is NaN."""
    in_flight: list[ToyStep] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    history: list[list[ScheduledChunk]] = field(default_factory=list)

    def __post_init__(self):
        self._cache = [_GARBAGE] * (self.num_blocks * self.block_size)
        self._holders: dict[int, RolloutSequence] = {}
        self._last_tokens: dict[int, int] = {}

    def admit(self, sequence):
        assert sequence.slot is not None and 0 <= sequence.slot < self.max_num_seqs
        self._holders[sequence.slot] = sequence

    def launch(self, chunks):
        assert chunks and len(self.in_flight) < 2, "one step ahead, no more"
        assert len({chunk.sequence.slot for chunk in chunks}) == len(chunks)
        # All read before any writes: a step must not need what another of its rows computes.
        computed = [self._compute(chunk) for chunk in chunks]
        for chunk, (entries, sampled) in zip(chunks, computed, strict=True):
            for position, entry in enumerate(entries, start=chunk.start):
                self._cache[self._place(chunk, position)] = entry
            if chunk.samples:
                assert chunk.sequence.slot is not None
                self._last_tokens[chunk.sequence.slot] = sampled[0][0] if not chunk.draft else -1
        self.events.append("launch")
        self.history.append(list(chunks))
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        step = ToyStep(self, [chunks[i] for i in sampling], [computed[i][1] for i in sampling])
        self.in_flight.append(step)
        return step

    def _compute(self, chunk):
        """The cache entries of the chunk's tokens, and what it samples."""
        sequence = chunk.sequence
        read = [self._cache[self._place(chunk, p)] for p in range(chunk.start)]
        entry, total = (read[-1] if read else 0), sum(read)
        entries = []
        sampled = []
        for index, token_id in enumerate(self._token_ids(chunk)):
            entry = entry_of(entry, token_id)
            total += entry
            entries.append(entry)
            if chunk.samples and index >= chunk.length - 1 - len(chunk.draft):
                position = chunk.start + index + 1
                drawn, logprob = draw(total, token_id, sequence, position)
                failed = (sequence.prompt_id, position) in self.fails_at
                sampled.append((drawn, math.nan if failed else logprob))
        return entries, sampled

    def _token_ids(self, chunk):
        sequence = chunk.sequence
        assert sequence.slot is not None and self._holders[sequence.slot] is sequence
        known = sequence.token_ids[chunk.start : chunk.end]
        pending = chunk.length - len(known) - len(chunk.draft)
        assert 0 <= pending <= 1 and not (pending and chunk.draft)
        return known + [self._last_tokens.get(sequence.slot, -1)] * pending + list(chunk.draft)

    def _place(self, chunk, position):
        block = chunk.sequence.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size


@dataclass(eq=False)
class Toy:
    """A step loop over the toy model, and what to look at from outside."""

    runner: ToyRunner
    blocks: BlockManager
    scheduler: Scheduler
    loop: StepLoop

    def run(self, sequences):
        """Serve all of them to their end."""
        for sequence in sequences:
            self.loop.add(sequence)
        self.finish()

    def finish(self, most=100000):
        for _ in range(most):
            if not self.loop.has_unfinished:
                return
            self.loop.step()
        raise AssertionError("the loop makes no progress")

    def check_empty(self):
        """Nothing is held any more: neither a block, nor a slot, nor a step."""
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert not any(block.ref_count for block in self.blocks._blocks)
        assert len(self.scheduler._free_slots) == self.runner.max_num_seqs
        assert not self.scheduler.has_unfinished and not self.runner.in_flight
        assert not self.scheduler._set_aside


class PreemptingScheduler(Scheduler):
    """Makes the youngest running sequence give way in given steps, as if blocks were missing.

    Not the last one: for it there would be room.
    """

    def __init__(self, *args, steps, **limits):
        super().__init__(*args, **limits)
        self._preempts_in = frozenset(steps)
        self._num_steps = 0

    def _decode_chunks(self):
        # Here and not before `schedule`: the step that preempts does not admit.
        self._num_steps += 1
        if self._num_steps in self._preempts_in and len(self._running) > 1:
            self._preempt(self._running[-1])
        return super()._decode_chunks()


def preempting(steps):
    """Schedulers that preempt in given steps, counted from 1, beside those that have to."""
    return partial(PreemptingScheduler, steps=steps)


def toy(
    *,
    num_blocks=64,
    block_size=4,
    max_num_seqs=16,
    share_prefixes=True,
    fails_at=frozenset(),
    scheduler=Scheduler,
    blocks=BlockManager,
    **limits,
):
    """A step loop over a fresh toy model."""
    manager = blocks(num_blocks, block_size, share_prefixes=share_prefixes)
    runner = ToyRunner(num_blocks, block_size, max_num_seqs, fails_at)
    limits = {"max_batch_tokens": 64, "max_num_seqs": max_num_seqs} | limits
    planner = scheduler(manager, **limits)
    return Toy(runner, manager, planner, StepLoop(runner, planner, manager))


def sequence_of(
    prompt, *, max_tokens=6, prompt_id=0, sample_index=0, speculation=0, stop=frozenset({STOP})
):
    return RolloutSequence(
        prompt_index=prompt_id,
        sample_index=sample_index,
        prompt_id=prompt_id,
        params=SamplingParams(max_tokens=max_tokens, speculation=speculation, seed=0),
        stop_token_ids=stop,
        token_ids=prompt,
        speculator=(Speculator(PromptLookupDrafter(), speculation, VOCAB) if speculation else None),
    )


def load(*, speculation=0, max_tokens=14):
    """Groups of sequences, their prompts with common prefixes, their lengths different."""
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


def check(sequences):
    """Asserts that sequences ended with the toy model's tokens."""
    for sequence in sequences:
        assert (sequence.token_ids, sequence.token_logprobs) == expected(sequence)
        assert sequence.finish_reason in ("stop", "length") and sequence.num_pending == 0
