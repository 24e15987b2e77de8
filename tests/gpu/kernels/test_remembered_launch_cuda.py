"""A kernel's launches from threads that CUDA has not met, as those of autograd are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core import launch as launches
from rl_consistency.kernels.gradient_fold.outer_triton import gradient_fold_outer
from tests.comparison import first_difference

pytestmark = pytest.mark.gpu


def folded(buffer, dy, x):
    gradient_fold_outer(buffer, dy, x, True)


def operands():
    dy, x = (probe((1024, 384), torch.bfloat16, seed).cuda() for seed in range(2))
    found = torch.full((384, 384), float("nan"), device="cuda")
    wanted = found.clone()
    folded(wanted, dy, x)
    torch.cuda.synchronize()
    return wanted, (found, dy, x)


def test_the_first_launch_of_a_thread_takes_descriptors():
    wanted, (found, dy, x) = operands()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(folded, found, dy, x).result()
    torch.cuda.synchronize()
    assert first_difference({"": found}, {"": wanted}) is None


def test_a_launch_that_asks_for_no_context_fails_the_same_check(monkeypatch):
    _, arguments = operands()
    monkeypatch.setattr(launches, "enter_context", lambda device: None)
    no_context = pytest.raises(RuntimeError, match="invalid device context")
    with ThreadPoolExecutor(1) as thread, no_context:
        thread.submit(folded, *arguments).result()
