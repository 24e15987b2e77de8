"""Which chunks a step gets: limits, order of admission, sharing, preemption, drafts.

That no schedule moves a token is shown in `test_step_loop.py`; here the schedule itself is looked
at, with every step reported before the next is scheduled.
"""

import pytest

from rl_consistency.rollout.scheduler import ScheduledChunk
from tests.rollout.toy import sequence_of, toy

NEVER = frozenset()


def launch(served):
    """Schedule and launch a step, nothing reported."""
    chunks = served.scheduler.schedule()
    for sequence in served.scheduler.admitted:
        served.runner.admit(sequence)
    launched = served.runner.launch(chunks)
    served.scheduler.mark_launched(chunks)
    return launched


def step(served):
    launched = launch(served)
    served.scheduler.take_in(launched.chunks, launched.wait())
    return served.runner.history[-1]


def add(served, *sequences):
    for sequence in sequences:
        served.scheduler.add(sequence)


def group_load():
    prompts = [[1, 2, 3] * 4, [1, 2, 3] * 4 + [5], [7], [9] * 17]
    return [
        sequence_of(prompt, max_tokens=3 + 4 * i, sample_index=i, prompt_id=p)
        for p, prompt in enumerate(prompts)
        for i in range(4)
    ]


def test_limits_hold_in_every_step():
    served = toy(max_batch_tokens=9, max_num_seqs=3, prefill_chunk_size=5)
    add(served, *group_load())
    while served.scheduler.has_unfinished:
        chunks = step(served)
        assert 0 < sum(chunk.length for chunk in chunks) <= 9
        assert len(chunks) <= 3 and all(chunk.length <= 5 for chunk in chunks)


def test_decoding_comes_before_prefill():
    served = toy(max_batch_tokens=6)
    add(served, sequence_of([1, 2, 3]))
    step(served)
    add(served, sequence_of([4] * 20, prompt_id=1))
    chunks = step(served)
    assert [chunk.length for chunk in chunks] == [1, 5]
    assert [chunk.samples for chunk in chunks] == [True, False]
    assert [chunk.is_decode for chunk in chunks] == [True, False]


def test_one_token_left_of_a_prompt_runs_like_a_decode_and_counts_as_prefill():
    served = toy(prefill_chunk_size=4)
    add(served, sequence_of([1] * 9, stop=NEVER))
    chunks = [step(served)[0] for _ in range(4)]
    assert [chunk.is_decode for chunk in chunks] == [False, False, True, True]
    assert served.scheduler.statistics.prefill_tokens == 9


def test_siblings_of_a_group_find_the_prompt_in_the_cache():
    served = toy(prefill_chunk_size=6)
    add(served, *(sequence_of([1] * 13, sample_index=i) for i in range(4)))
    steps = [[chunk.length for chunk in step(served)] for _ in range(3)]
    # The first sample computes the three full blocks alone; then each computes its last token.
    assert steps == [[6], [6], [1, 1, 1, 1]]
    assert served.scheduler.statistics.prefix_hit_tokens == 3 * 12


def test_siblings_follow_as_soon_as_the_prompt_is_under_way():
    served = toy()
    add(served, *(sequence_of([1] * 13, sample_index=i) for i in range(3)))
    first, second = launch(served), launch(served)  # nothing reported in between
    assert [c.start for c in first.chunks] == [0]
    assert [c.start for c in second.chunks] == [13, 12, 12]
    assert [c.sequence.sample_index for c in second.chunks] == [0, 1, 2]


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_prefix_is_shared_while_the_rest_of_its_prompt_is_computed(chunk):
    served = toy(prefill_chunk_size=chunk)
    first = sequence_of([1] * 8 + [2] * 40, stop=NEVER)
    other = sequence_of([1] * 8 + [3] * 40, prompt_id=1, stop=NEVER)
    add(served, first, other)
    for _ in range(8 // chunk):
        assert [c.sequence for c in step(served)] == [first]
    assert [(c.sequence, c.start) for c in step(served)] == [(first, 8), (other, 8)]


def test_other_prompts_overtake_siblings_that_wait():
    served = toy()
    first, sibling = (sequence_of([1] * 9, sample_index=i, stop=NEVER) for i in range(2))
    other = sequence_of([2] * 9, prompt_id=1, stop=NEVER)
    add(served, first, sibling, other)
    assert [chunk.sequence for chunk in step(served)] == [first, other]
    assert [chunk.sequence for chunk in step(served)] == [first, other, sibling]


def test_siblings_of_a_cancelled_sequence_compute_the_prompt_themselves():
    served = toy(prefill_chunk_size=4)
    first, sibling = (sequence_of([1] * 13, sample_index=i, stop=NEVER) for i in range(2))
    add(served, first, sibling)
    step(served)
    first.finish("cancelled")
    served.scheduler.finish(first)
    chunks = step(served)
    assert [(c.sequence, c.start) for c in chunks] == [(sibling, 4)]


def test_the_longest_are_admitted_first_then_the_order_of_arrival_counts():
    served = toy(max_num_seqs=1)
    lengths = [3, 9, 5, 9, 4]
    sequences = [
        sequence_of([p], max_tokens=n, prompt_id=p, stop=NEVER) for p, n in enumerate(lengths)
    ]
    add(served, *sequences)
    order = []
    while served.scheduler.has_unfinished:
        prompt_id = step(served)[0].sequence.prompt_id
        if prompt_id not in order:
            order.append(prompt_id)
    assert order == [1, 3, 2, 4, 0]


def test_a_sequence_is_admitted_only_if_those_running_can_still_grow():
    served = toy(num_blocks=6, share_prefixes=False)
    sequences = [sequence_of([p] * 8, max_tokens=5, prompt_id=p, stop=NEVER) for p in (1, 2, 3)]
    add(served, *sequences)
    step(served)
    # The third would take the last two blocks, one of which each of the others will need.
    assert [s.slot is not None for s in sequences] == [True, True, False]
    while served.scheduler.has_unfinished:
        step(served)
    assert served.scheduler.statistics.preemptions == 0


def test_no_more_sequences_run_than_a_step_has_tokens():
    served = toy(max_batch_tokens=9)
    sequences = [
        sequence_of([1, 4, 0], max_tokens=30, prompt_id=p, speculation=0 if p else 7, stop=NEVER)
        for p in range(16)
    ]
    add(served, *sequences)
    most = 0
    while served.scheduler.has_unfinished:
        served.loop.step()
        most = max(most, sum(sequence.slot is not None for sequence in sequences))
    assert most == 9


def test_drafts_leave_a_token_for_everybody_who_runs():
    served = toy(max_batch_tokens=24, share_prefixes=False)
    sequences = [
        sequence_of([1, 4, 0] * 2, max_tokens=30, prompt_id=p, speculation=7, stop=NEVER)
        for p in range(4)
    ]
    add(served, *sequences)
    launched = launch(served)
    launched.wait()
    served.scheduler.take_in(launched.chunks, [[(1, -1.0)]] * len(sequences))
    for sequence in sequences:
        sequence.speculator.observe(7, 3, 3)  # drafts of 7 from now on
    assert [chunk.length for chunk in launch(served).chunks] == [8, 8, 7, 1]


def crowded():
    """Three sequences with room for two of them at their full length."""
    served = toy(num_blocks=11, share_prefixes=False)
    sequences = [sequence_of([p] * 7, max_tokens=14, prompt_id=p, stop=NEVER) for p in (1, 2, 3)]
    add(served, *sequences)
    return served, sequences


def test_the_most_recently_admitted_sequence_is_preempted_and_keeps_its_tokens():
    served, (first, second, last) = crowded()
    while not served.scheduler.statistics.preemptions:
        generated, logprobs = list(last.token_ids), list(last.token_logprobs)
        step(served)
    assert last.slot is None and last.preempted
    assert first.slot is not None and second.slot is not None
    assert (last.token_ids, last.token_logprobs) == (generated, logprobs)
    assert (last.block_table, last.num_computed_tokens) == ([], 0)
    assert last.preempted and not first.preempted


def test_preempted_sequences_come_back_before_others():
    served, (*_, last) = crowded()
    while not served.scheduler.statistics.preemptions:
        step(served)
    add(served, longer := sequence_of([5] * 7, max_tokens=30, prompt_id=5, stop=NEVER))
    while last.slot is None:
        assert longer.slot is None
        step(served)
    assert served.scheduler.admitted[0] is last


def test_a_sequence_preempted_before_its_first_token_comes_back_before_others_too():
    served = toy(max_num_seqs=2, prefill_chunk_size=4)
    first, sibling = (sequence_of([1] * 13, sample_index=i, stop=NEVER) for i in range(2))
    add(served, first, sibling)
    for _ in range(3):  # the sibling waits for the prompt
        step(served)
        sibling.preempted = True
    add(served, sequence_of([5], max_tokens=30, prompt_id=5, stop=NEVER))
    step(served)
    assert served.scheduler.admitted == [sibling]


def test_a_sequence_whose_last_token_is_pending_is_not_scheduled():
    served = toy()
    sequence = sequence_of([1, 2], max_tokens=2, stop=NEVER)
    add(served, sequence)
    first = launch(served)
    (chunk,) = launch(served).chunks
    assert (chunk.start, chunk.length, sequence.num_tokens) == (2, 1, 2)  # one pending token
    assert not served.scheduler.prefers_report  # it does not draft
    served.scheduler.take_in(first.chunks, first.wait())
    assert served.scheduler.schedule() == [] and served.scheduler.has_unfinished


def test_a_draft_waits_for_the_report_and_then_stands_behind_the_known_tokens():
    served = toy()
    sequence = sequence_of([1, 4, 0] * 3, max_tokens=20, speculation=3, stop=NEVER)
    add(served, sequence)
    launched = launch(served)
    assert served.scheduler.prefers_report and served.scheduler.schedule() == []
    served.scheduler.take_in(launched.chunks, launched.wait())
    assert sequence.token_ids[-1] == 1 and not served.scheduler.prefers_report
    (chunk,) = launch(served).chunks
    assert chunk == ScheduledChunk(sequence, 9, 4, True, (4, 0, 1)) and chunk.is_decode
    assert (sequence.num_computed_tokens, sequence.num_drafted) == (10, 3)
    assert served.scheduler.prefers_report and served.scheduler.schedule() == []


def test_the_queue_forgets_those_cancelled():
    served = toy(max_num_seqs=1)
    add(served, sequence_of([1], max_tokens=100, stop=NEVER))
    step(served)
    for number in range(1000):
        waiting = sequence_of([2], prompt_id=number)
        add(served, waiting)
        waiting.finish("cancelled")
        served.scheduler.finish(waiting)
    assert len(served.scheduler._waiting) < 100
