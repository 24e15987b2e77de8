"""A sequence's state: what counts as computed, and when it ends."""

import math

import pytest

from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.sequence import RolloutSequence


def make(prompt, *, max_tokens=3, stop=()):
    return RolloutSequence(
        prompt_index=0,
        sample_index=0,
        prompt_id=0,
        params=SamplingParams(max_tokens=max_tokens),
        stop_token_ids=frozenset(stop),
        token_ids=prompt,
    )


def test_a_sequence_copies_its_prompt():
    prompt = [1, 2, 3]
    sequence = make(prompt)
    sequence.append(9, -0.5)
    assert prompt == [1, 2, 3]
    assert (sequence.num_prompt_tokens, len(sequence.token_logprobs)) == (3, 1)


def test_all_known_tokens_but_the_computed_ones_are_to_do():
    sequence = make([1, 2, 3])
    assert sequence.num_uncomputed_tokens == 3
    sequence.num_computed_tokens = 3
    sequence.append(4, -1.0)
    assert sequence.num_uncomputed_tokens == 1


def test_a_stop_token_is_kept_and_ends_the_sample():
    sequence = make([1], stop=(7,))
    sequence.append(5, -1.0)
    assert not sequence.is_finished
    sequence.append(7, -0.25)
    assert sequence.finish_reason == "stop"
    assert (sequence.token_ids, sequence.token_logprobs) == ([1, 5, 7], [-1.0, -0.25])


def test_a_stop_token_in_the_prompt_ends_nothing():
    assert not make([7, 7], stop=(7,)).is_finished


def test_the_last_slot_ends_the_sample_by_length_unless_it_is_a_stop_token():
    plain, stopped = make([1], max_tokens=2, stop=(7,)), make([1], max_tokens=2, stop=(7,))
    for sequence, last in ((plain, 6), (stopped, 7)):
        sequence.append(5, -1.0)
        sequence.append(last, -1.0)
    assert (plain.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_a_pending_token_is_scheduled_but_not_known():
    sequence = make([1, 2, 3])
    sequence.num_computed_tokens, sequence.num_pending = 3, 1
    assert (sequence.num_tokens, sequence.num_scheduled_tokens) == (3, 4)
    assert (sequence.num_uncomputed_tokens, len(sequence.token_logprobs)) == (1, 0)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_ends_the_sample_with_an_error(logprob):
    sequence = make([1, 2])
    sequence.append(5, -1.0)
    sequence.append(6, logprob)
    assert sequence.is_finished and sequence.finish_reason == "error"
    assert sequence.error is not None
    assert sequence.error.startswith("prompt 0, sample 0, position 3: the model gave a logprob")
    assert (sequence.token_ids, sequence.token_logprobs) == ([1, 2, 5], [-1.0])


def test_a_reopened_sample_goes_on_with_the_tokens_it_had():
    sequence = make([1, 2])
    sequence.append(5, -1.0)
    sequence.append(6, math.nan)
    sequence.reopen()
    assert not sequence.is_finished and sequence.error is None
    sequence.append(7, -2.0)
    assert (sequence.token_ids, sequence.token_logprobs) == ([1, 2, 5, 7], [-1.0, -2.0])
