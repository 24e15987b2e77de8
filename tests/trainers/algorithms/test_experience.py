"""What an algorithm learns from."""

import torch

from rl_consistency.trainers.algorithms.experience import Experience


def test_lengths_are_counted_once_however_often_they_are_asked_for():
    logprobs = [torch.zeros(3), torch.zeros(5)]
    experience = Experience(
        sequences=[[1] * 4, [1] * 6], prompt_lengths=[1, 1], old_logprobs=logprobs, keep=None
    )
    assert experience.lengths == [3, 5]
    assert experience.lengths is experience.lengths
