"""Where no NVIDIA GPU is present, Triton kernels run in its interpreter and gpu tests are skipped.

The variable has to stand before anything imports triton; importing a transformers model does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from triton_interpreter import install
    finally:
        sys.path.pop(0)
    install()


LONGEST_ON_A_GPU = ("test_random_schedules", "test_verify_cuda")
"""Files that are begun first there, so that no process ends minutes after the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; where there is one, the longest come first."""
    if HAS_GPU:
        items.sort(key=lambda item: item.path.stem not in LONGEST_ON_A_GPU)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU (sm_80 or later)"))
