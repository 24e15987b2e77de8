"""A process that compiles the kernels of attention/hopper for sm_90 with no GPU at hand, and prints
head size, name, registers' spills in bytes, shared memory, and whether the front end wrote checks
of overflow. Nothing runs."""

import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention, SharedRun
from rl_consistency.kernels.attention.paged_cache_triton import HeadNorms, paged_inputs_fwd
from rl_consistency.kernels.attention.schedules import DECODE_LAST, Cut
from rl_consistency.kernels.core.launch import Remembered

SHARED = 227 << 10
ANSWERS = {
    "has_tma": lambda device: True,
    "has_wgmma": lambda device: True,
    "sm_count": lambda device: 132,
    "shared_memory": lambda device: SHARED,
}
"""What an H100 would say."""

H100 = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
)


def compile_only():
    """From now on a launch compiles, and its kernel is kept in the list."""
    found, run = [], JITFunction.run

    def compiled(self, *args, **options):
        kernel = run(self, *args, **(options | {"warmup": True}))
        found.append((self.__name__, kernel))
        return kernel

    driver.set_active(H100)
    JITFunction.run = compiled
    Remembered.launch = lambda self, grid, *args, **named: self.kernel[grid](*args, **named)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("rl_consistency"):
            for name in ANSWERS.keys() & vars(module).keys():
                setattr(module, name, ANSWERS[name])
    return found


def calls(dim):
    """One call of each kernel, for heads of a size."""
    q, keys = (torch.zeros(512, n, dim, dtype=torch.bfloat16) for n in (12, 2))
    packed = PackedSequences.of([0, 256], [256, 256])
    lse = torch.zeros(512, 12)
    yield lambda: attention_fwd(q, keys, keys, packed, 0.1, None)
    yield lambda: attention_bwd(q, q, keys, keys, q, lse, packed, 0.1, None)
    cos = torch.zeros(512, dim // 2)
    cache = torch.zeros(32, 16, 2, dim, dtype=torch.bfloat16)
    slots = torch.arange(512)
    norms = HeadNorms(q[0, 0], q[0, 0], 1e-6, 1e-6)
    yield lambda: paged_inputs_fwd(q, keys, keys, cos, cos, norms, cache, cache, slots)
    for rows, runs in ((4, ()), (256, [SharedRun(8 * i, 8, 2048) for i in range(32)])):
        paged = PagedAttention(
            query_starts=range(rows),
            query_lens=[1] * rows,
            context_lens=[2100] * rows,
            block_tables=[list(range(132))] * rows,
            slot_mapping=torch.zeros(rows, dtype=torch.int64),
            key_cache=[],
            value_cache=[],
            block_size=16,
            shared_runs=runs,
        )
        cache = torch.zeros(132 * 16, 2, dim, dtype=torch.bfloat16)
        yield lambda q=q[:rows], cache=cache, paged=paged: attention_fwd(
            q, cache, cache, paged, 0.1, None
        )
        if not runs:
            yield lambda q=q[:rows], cache=cache, paged=paged: attention_fwd(
                q, cache, cache, paged, 0.1, None, schedule=DECODE_LAST, cut=Cut(3, 30)
            )


def spilled(kernel):
    """Bytes of a thread's stack."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        )
    text = shown.stdout + shown.stderr
    return int(text.rpartition("STACK:")[2].split()[0])


if __name__ == "__main__":
    compiled = compile_only()
    for dim, count in ((128, None), (80, 2), (256, 2)):
        # Heads that do not fill their columns and wide ones: forward and backward differ by size.
        first = len(compiled)
        for call in islice(calls(dim), count):
            call()
        for name, kernel in compiled[first:]:
            checks = kernel.metadata.sanitize_overflow
            print(dim, name, spilled(kernel), kernel.metadata.shared, checks)
