import json
import random

import numpy as np
import pytest
import torch

from rl_consistency.trainers.run_directory.checkpoint import capture, restore, seeded


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


def test_the_state_of_a_gpu_in_use_is_kept_and_put_back(monkeypatch):
    state = torch.tensor([7, 0, 255, 3], dtype=torch.uint8)
    given = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    captured = json.loads(json.dumps(capture()))
    restore(captured)
    assert torch.equal(given[0], state)
    restore(captured | {"cuda": None})
    assert len(given) == 1
