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
    "attention_decode_kernel",
    "attention_prefix_kernel",
}
KERNELS = GLUON | {"paged_inputs_kernel"}
MOST_SPILLED = 64
"""Bytes. Addresses of the copying warps spill a few; sums of a tile would be hundreds."""


MOST_SPILLED_WIDE = 128
"""The same for heads above 128, whose sums of 256 columns leave few registers. If the compiler put
off adding to them, as it likes to, it would be 500."""


def compiled_for(*head_dims, caches):
    """What the process prints for heads of these sizes."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", compile_for_sm90.__name__, *map(str, head_dims)],
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(caches)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Kernels for heads that fill their columns, and for heads that do not."""
    return compiled_for(128, 80, caches=tmp_path_factory.mktemp("triton"))


def test_every_kernel_of_hopper_compiles_and_fits_a_multiprocessor(compiled):
    assert {name for name, *_ in compiled} >= KERNELS
    for name, spilled, shared, _ in compiled:
        assert int(spilled) <= MOST_SPILLED, name
        assert int(shared) <= compile_for_sm90.SHARED, name


def test_the_front_end_writes_no_checks_of_overflow_for_gluon_kernels(compiled):
    """They take it long, and only Triton's debug mode keeps them."""
    assert {name for name, *_, checks in compiled if checks == "False"} == GLUON


def test_the_forward_pass_of_wide_heads_keeps_its_sums_in_registers(tmp_path):
    compiled = compiled_for(256, caches=tmp_path)
    [(spilled, shared)] = [line[1:3] for line in compiled if line[0] == "attention_hopper_kernel"]
    assert int(spilled) <= MOST_SPILLED_WIDE and int(shared) <= compile_for_sm90.SHARED
