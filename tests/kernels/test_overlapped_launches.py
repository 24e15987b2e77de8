"""What a kernel does while the kernel ahead may still write what it will read."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_consistency.kernels.attention import paged_cache_triton
from rl_consistency.kernels.pointwise import embedding
from tests.kernels import compile_overlapped

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PREFETCHING = {
    "qkv_kernel",
    "gate_up_glu_tma_kernel",
    "gate_up_glu_pointer_kernel",
    "tma_kernel",
}
"""Kernels that ask for weights; in a CUDA graph decode asks for keys."""
KERNELS = PREFETCHING | {
    "_forward_kernel",
    "choose_kernel",
    "count_kernel",
    "place_kernel",
    "product_kernel",
    "combine_kernel",
    "paged_inputs_kernel",
    "attention_decode_kernel",
    "attention_prefix_kernel",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of each kernel its name, and how often it does what `BEFORE` lists before it waits."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", compile_overlapped.__name__],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, waits, *_ in lines if not int(waits)] == []
    return [(name, *map(int, counts)) for name, _, *counts in lines]


def test_every_file_whose_launches_overlap_is_compiled(compiled):
    sources = [path.read_text() for path in (ROOT / "kernels").rglob("*.py")]
    waiting = sum(source.count("gdc_wait()\n") for source in sources)
    assert all("gdc_wait()\n" in source for source in sources if "launch_pdl" in source)
    # Decode waits in one of two places, and the norm and the gated unit share a name.
    assert waiting == len(KERNELS) + 2
    assert [name for name, *_ in compiled].count("_forward_kernel") == 2


def test_launches_that_do_not_overlap_lie_between_tables_and_layers():
    """They are done before any kernel of a layer starts, and so is what was launched before."""
    for first in (embedding, paged_cache_triton.cache_write_fwd):
        assert "launch_pdl" not in inspect.getsource(first)


def test_nothing_is_copied_or_written_before_the_kernel_ahead_is_done(compiled):
    assert {name for name, *_ in compiled} == KERNELS
    for name, _, copies, writes, *_ in compiled:
        assert (copies, writes) == (0, 0), name


def test_all_but_one_let_the_next_kernel_start_only_after_their_own_wait(compiled):
    """Else attention could read tables while a kernel still runs that writes them."""
    assert {name for name, *_, releases in compiled if releases} == {"tma_kernel"}


def test_what_is_read_before_that_is_tables(compiled):
    early = [(name, loads) for name, loads, *_ in compiled if loads]
    # Of attention the tile's two numbers, three of its sequence, and the blocks of two steps of
    # keys; with groups the keys that a sequence shares.
    decode = [("attention_decode_kernel", loads) for loads in (7, 7, 8)]
    assert early == decode


def test_weights_and_keys_are_asked_for_before_that(compiled):
    asking = [name for name, *_, prefetches, _ in compiled if prefetches]
    assert set(asking) == PREFETCHING | {"attention_decode_kernel"}
    assert asking.count("attention_decode_kernel") == 3
