"""A sequence's state: what counts as computed, and when it ends."""

import math

import pytest

from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.device.launches import sample_of

SHORT = SamplingParams(max_tokens=2)


def test_a_stop_token_is_kept_and_ends_the_sample():
    sequence = sample_of([1], stop=(7,))
    sequence.append(5, -1.0)
    assert not sequence.is_finished
    sequence.append(7, -0.25)
    assert sequence.finish_reason == "stop"
    assert (sequence.token_ids, sequence.token_logprobs) == ([1, 5, 7], [-1.0, -0.25])


def test_the_last_slot_ends_the_sample_by_length_unless_it_is_a_stop_token():
    plain, stopped = (sample_of([1], params=SHORT, stop=(7,)) for _ in range(2))
    for sequence, last in ((plain, 6), (stopped, 7)):
        sequence.append(5, -1.0)
        sequence.append(last, -1.0)
    assert (plain.finish_reason, stopped.finish_reason) == ("length", "stop")


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_ends_the_sample_with_an_error(logprob):
    sequence = sample_of([1, 2])
    sequence.append(5, -1.0)
    sequence.append(6, logprob)
    assert sequence.is_finished and sequence.finish_reason == "error"
    assert sequence.error is not None
    assert sequence.error.startswith("prompt 0, sample 0, position 3: the model gave a logprob")
    assert (sequence.token_ids, sequence.token_logprobs) == ([1, 2, 5], [-1.0])
