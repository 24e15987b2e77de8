"""Negative controls of the loop: each mutant breaks one rule and must be seen."""

from collections.abc import Callable
from typing import Any

import pytest

from rl_consistency.rollout import scheduler
from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.scheduler import Scheduler
from tests.rollout.toy import check, expected, load, sequence_of, toy

Make = Callable[..., Any]


@pytest.fixture
def served_well():
    """Tells whether heavy traffic comes out right."""

    def serve(**changes):
        tight = {"num_blocks": 14, "max_batch_tokens": 24, "prefill_chunk_size": 5} | changes
        try:
            for speculation in (0, 7):
                # The second round meets the blocks that the first has left in the cache.
                served = toy(**tight)
                for _ in range(2):
                    sequences = load(speculation=speculation, max_tokens=20)
                    served.run(sequences)
                    check(sequences)
                    served.check_empty()
        except (AssertionError, LookupError):  # the toy model refuses, or finds no such block
            return False
        return True

    return serve


def test_the_traffic_of_the_mutants_is_served_well(served_well):
    assert served_well()


class KeepsExtraRow(Scheduler):
    """Does not notice that a sequence had ended when its last row was launched."""

    def take_in(self, chunks, sampled_rows):
        for chunk in chunks:
            chunk.sequence.finish_reason = None
        return super().take_in(chunks, sampled_rows)


class SharesTooEarly(BlockManager):
    """Hands out blocks before any step writes them."""

    def _announce(self, sequence, index):
        super()._announce(sequence, index)
        self._blocks[sequence.block_table[index]].computed = True


class CountsGuessesAsComputed(Scheduler):
    """Takes the keys of rejected guesses for good."""

    def mark_launched(self, chunks):
        super().mark_launched(chunks)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end


class CountsTokensTwice(Scheduler):
    """Counts a step's tokens twice."""

    def mark_launched(self, chunks):
        super().mark_launched(chunks)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += not chunk.samples


class LosesBlocks(Scheduler):
    """Forgets the last block of a sequence that ends."""

    def finish(self, sequence):
        if len(sequence.block_table) > 1:
            sequence.block_table.pop()
        super().finish(sequence)


class GoesOnBehindADraft(Scheduler):
    """Schedules the token behind a draft as if it were the only pending one."""

    def mark_launched(self, chunks):
        super().mark_launched(chunks)
        for chunk in chunks:
            chunk.sequence.num_drafted = 0

    def _draft(self, sequence, room):
        return super()._draft(sequence, room) or ()

    @property
    def prefers_report(self):
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
def test_a_broken_rule_is_caught(served_well, mutant):
    assert not served_well(**mutant)


class PublishesEachStep(Scheduler):
    """Asks for the publication of what a step computes as soon as it is launched."""

    def mark_launched(self, chunks):
        super().mark_launched(chunks)
        for chunk in chunks:
            self._blocks.publish(chunk.sequence)


class NamesPendingTokens(BlockManager):
    """Publishes a block as soon as a step fills it, its last token unknown."""

    def publish(self, sequence):
        known = sequence.token_ids
        missing = sequence.num_computed_tokens - len(known)
        sequence.token_ids = known + [0] * max(missing, 0)
        super().publish(sequence)
        sequence.token_ids = known


@pytest.mark.parametrize("blocks", [BlockManager, NamesPendingTokens])
def test_a_block_named_before_its_last_token_is_known_is_caught(blocks):
    served = toy(blocks=blocks, scheduler=PublishesEachStep)
    first = sequence_of([3, 4, 5], max_tokens=9, stop=frozenset())
    served.run([first])
    token_ids = expected(first)[0]
    assert token_ids[3] != 0  # the first block ends with it, and is computed before it is known
    later = sequence_of([3, 4, 5, 0, 6], prompt_id=1)
    served.run([later])
    assert (later.token_ids == expected(later)[0]) == (blocks is BlockManager)


@pytest.mark.parametrize("off", [-1, 1])
def test_an_acceptance_rule_off_by_one_is_caught(monkeypatch, off):
    right = scheduler.num_accepted

    def wrong(draft, sampled):
        return max(min(right(draft, sampled) + off, len(draft)), 0)

    monkeypatch.setattr(scheduler, "num_accepted", wrong)
    sequences = load(speculation=7, max_tokens=40)
    served = toy()
    served.run(sequences)
    tokens_right = [s.token_ids for s in sequences] == [expected(s)[0] for s in sequences]
    # One token too few is only slower: the next step samples it again, the same.
    assert tokens_right == (off < 0)
