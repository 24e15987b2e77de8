import json
import random

import numpy as np
import pytest
import torch

from rl_consistency.trainers.random_state import capture, restore, seeded


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1)


def test_a_captured_state_gives_the_same_draws_after_json():
    draws()
    state = json.loads(json.dumps(capture()))
    expected = draws()
    assert draws() != expected
    restore(state)
    assert draws() == expected


def test_seeded_blocks_repeat_and_leave_no_trace_even_on_an_error():
    before = capture()
    with seeded(3):
        first = draws()
    with pytest.raises(RuntimeError), seeded(3):
        assert draws() == first
        raise RuntimeError
    assert capture() == before
