"""The routing of a rollout: of all its completions, or of none."""

import pytest
import torch

from rl_consistency.rollout.completion import Completion, routing_of


def completion(tokens, routing, place=(0, 0)):
    return Completion(
        prompt_index=place[0],
        sample_index=place[1],
        token_ids=[7] * tokens,
        token_logprobs=torch.zeros(tokens),
        finish_reason="length",
        routing=routing,
    )


def test_a_dense_model_has_no_routing_and_a_sparse_one_that_of_every_token():
    assert routing_of([completion(2, None), completion(3, None)]) is None
    first, last = torch.arange(2), torch.arange(3)
    cancelled = completion(0, None)  # before its first token
    found = routing_of([completion(2, first), cancelled, completion(3, last)])
    assert found is not None
    assert [part.tolist() for part in found] == [[0, 1], [], [0, 1, 2]]


def test_a_rollout_of_which_some_completions_lack_their_routing_is_refused():
    """One completion without would take the comparison of experts from all others."""
    lacking = [completion(2, None, (3, 1)), completion(2, None, (4, 0))]
    with pytest.raises(ValueError, match=r"2 of 3 completions .* prompt 3 sample 1, prompt 4 samp"):
        routing_of([completion(2, torch.arange(2)), *lacking])
