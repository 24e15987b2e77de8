"""The kernels that no interpreter runs compile with the Triton that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.attention import compile_for_sm90

GLUON = {
    "attention_hopper_kernel",
    "attention_backward_hopper_kernel",
    "attention_wide_dq_kernel",
    "attention_wide_dkv_kernel",
    "attention_decode_kernel",
    "attention_prefix_kernel",
}
KERNELS = GLUON | {"paged_inputs_kernel", "attention_statistics_kernel"}
MOST_SPILLED = {"80": 64, "128": 64, "256": 128}
"""Bytes, by head size. Addresses of the copying warps spill a few; sums of a tile would be
hundreds, those of a wide head 500: the compiler likes to put off adding to them."""
SPILLED = {"attention_wide_dq_kernel": 208}
"""The same of kernels that spill more."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the process prints of each kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", compile_for_sm90.__name__],
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.thorough
def test_every_kernel_of_hopper_compiles_and_fits_a_multiprocessor(compiled):
    assert {name for _, name, *_ in compiled} == KERNELS
    for dim, name, spilled, shared, _ in compiled:
        assert int(spilled) <= SPILLED.get(name, MOST_SPILLED[dim]), (dim, name)
        assert int(shared) <= compile_for_sm90.SHARED, (dim, name)


@pytest.mark.thorough
def test_the_front_end_writes_no_checks_of_overflow_for_gluon_kernels(compiled):
    """They take it long, and only Triton's debug mode keeps them."""
    assert {name for _, name, *_, checks in compiled if checks == "False"} == GLUON
