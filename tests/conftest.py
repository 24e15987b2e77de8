"""Where no NVIDIA GPU is present, Triton kernels run in its interpreter and gpu tests are skipped.

The variable has to stand before anything imports triton; importing a transformers model does.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from rl_consistency.numerics import settings

# A shell has its background jobs ignore these, and `nohup` too; tests of signals send them.
for _number, _action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _action)

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from triton_interpreter import install
    finally:
        sys.path.pop(0)
    install()


LONGEST_ON_A_GPU = (
    "test_random_schedules",
    "test_verify_cuda",
    "test_many_requests",
    "test_library_cuda",
)
"""Files that are begun first there, so that no process ends minutes after the others.

pytest-xdist deals tests out in pairs, so a short one stands behind each of theirs.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "kills and flipped bits that test_kills_and_flips.py tries, of each so many"
    parser.addoption("--attempts", type=int, default=5, help=text)
    parser.addoption("--fuzz-seconds", type=float, default=6, help="time of tests/fuzz; inf too")
    parser.addoption("--fuzz-seed", type=int, default=0, help="first case of tests/fuzz")


@pytest.hookimpl(trylast=True)  # of what is not deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; where there is one, the longest come first."""
    if HAS_GPU:
        longest = [item for item in items if item.path.stem in LONGEST_ON_A_GPU]
        others = [item for item in items if item.path.stem not in LONGEST_ON_A_GPU]
        pairs = zip_longest(longest, others)
        items[:] = [item for pair in pairs for item in pair if item is not None]
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU (sm_80 or later)"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What the modules of tests import is no garbage: nothing looks for any, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def nothing_held(monkeypatch):
    """Sessions that other tests of this process left open hold no settings here."""
    gc.collect()
    monkeypatch.setattr(settings, "_held", [])
