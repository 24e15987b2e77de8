"""Random models, changes, engine settings, cuts and interruptions; `--fuzz-seconds inf` by hand."""

import random
import time
from itertools import count

import pytest
import torch

from rl_consistency.models import coverage, families
from rl_consistency.models import patch as patching
from tests.fuzz import cases


@pytest.mark.thorough
def test_random_cases_are_right_or_refused(pytestconfig, capsys):
    seconds = pytestconfig.getoption("--fuzz-seconds")
    end, done, refused = time.monotonic() + seconds, 0, 0
    for seed in count(pytestconfig.getoption("--fuzz-seed")):
        if done >= 12 and time.monotonic() > end:
            break
        try:
            outcome = cases.run(seed)
        except BaseException as error:
            error.add_note(f"the case of --fuzz-seed {seed}")
            raise
        done, refused = done + 1, refused + (outcome.refused is not None)
        if seconds > 300 and done % 100 == 0:
            with capsys.disabled():
                print(f"\r{done} cases, {refused} refused, next seed {seed + 1}", end="")
    assert 0 < refused < done


PASSED_OVER = (
    *("hook_on_lm_head", "hook_on_base_model", "another_activation"),
    *("edited_frequencies", "bias_of_the_head", "embedding_with_max_norm"),
    "gradients_scaled_by_frequency",
)
A_MIXTRAL = 1
"""A seed whose model has experts; that of the others is dense."""


@pytest.mark.parametrize(
    "name, seed", [*((name, 3) for name in PASSED_OVER), ("fewer_experts", A_MIXTRAL)]
)
def test_without_the_inventory_the_same_oracle_finds_it_wrong(name, seed, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(families, "check_code", lambda config: None)
    for place in (coverage, patching):
        monkeypatch.setattr(place, "faults", lambda model, patched=False: [])
    (change,) = [change for change in cases.MODIFICATIONS if change.__name__ == name]
    with pytest.raises(AssertionError, match="off, allowed"):
        cases.run(seed, (random.Random(seed), torch.float32, [change], []))
