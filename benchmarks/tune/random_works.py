"""Works of `tune` at shapes drawn by a seed, and a compilation of their schedules beforehand.

These are the data from which a model of the schedules' cost is made, so each shape times every
schedule of the op that is not out of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.random_shapes import draw_folds, draw_products
from benchmarks.tune.works import BF16
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.gradient_fold import schedules as fold_outer
from rl_consistency.kernels.matmul import schedules as matmul
from rl_consistency.tuning.products import fold, product
from rl_consistency.tuning.work import Work

COMPILED_ROWS, COMPILED_WIDTH = 64, 512
"""The operands for which schedules are compiled. Triton compiles one version for all widths that
are multiples of 16, and for all numbers of rows."""


def random_products(device: torch.device, seed: int, count: int) -> Iterator[Work]:
    """`count` products."""
    for shape in draw_products(seed, count):
        picked = matmul.pick(**shape, dtype=BF16, tma=True)
        schedules = dict.fromkeys([*matmul.fitting(shape["m"]), picked])
        yield product(device, **shape, dtype=BF16, out_dtype=BF16, own=list(schedules))


def random_folds(device: torch.device, seed: int, count: int) -> Iterator[Work]:
    """`count` gradient folds; beside them the vendor's product, added to the gradient."""
    for shape in draw_folds(seed, count):
        yield _described_fold(device, **shape)


def _described_fold(device: torch.device, tokens: int, n: int, k: int) -> Work:
    """A fold by schedules with descriptors, where the device has them; by pointers elsewhere."""
    work = fold(device, tokens, n, k, BF16, fresh=False)
    if has_tma(device):
        tiled = {s.name for s in fold_outer.candidates(BF16, tma=True) if s.kind == "tma"}
        timed = {name: call for name, call in work.candidates.items() if name in tiled}
        work = replace(work, candidates=timed)
    return replace(work, others={"cublas fp32 + add": multiply_and_add})


def multiply_and_add(dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    """The vendor's dW in fp32, added to the gradient in place."""
    return gradient.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))


RANDOM_OPS: dict[str, Callable[[torch.device, int, int], Iterator[Work]]] = {
    "matmul": random_products,
    "fold": random_folds,
}
"""Device, seed and count -> works."""


def compile_schedules(op: str, workers: int) -> None:
    """Compile the schedules of an op of `RANDOM_OPS` into Triton's cache on disk, in as many
    processes. Raises what a process raised, BrokenProcessPool where one died."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, op, i, workers) for i in range(workers)]
        for share in shares:
            share.result()


def compile_share(op: str, worker: int, workers: int) -> None:
    """Run every `workers`-th schedule of an op once, from number `worker` on."""
    device = torch.device("cuda", torch.cuda.current_device())
    works = _compiled_works(op, device)
    calls = [(work, call) for work in works for call in work.candidates.values()]
    for work, call in calls[worker::workers]:
        with suppress(OutOfResources):  # `measured` names it
            call(*work.operands())
    torch.cuda.synchronize()


def _compiled_works(op: str, device: torch.device) -> list[Work]:
    """Small works that hold every schedule of an op."""
    rows, width = COMPILED_ROWS, COMPILED_WIDTH
    if op == "fold":
        return [_described_fold(device, rows, width, width)]
    tiled = [s for s in matmul.CANDIDATES if s.kind == "tma"]
    return [
        product(device, layout, rows, width, width, BF16, BF16, own=tiled)
        for layout in ("nt", "nn")
    ]
