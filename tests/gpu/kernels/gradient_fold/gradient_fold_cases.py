"""Operands of the gradient fold on a GPU."""

import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.op import (
    fold_outer,
)
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer
from tests.comparison import first_difference

TOKENS, N, K, VOCABULARY = 1024, 384, 512, 37
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same_bytes(a, b):
    return first_difference({"": a}, {"": b}) is None


def data(shape, dtype=torch.bfloat16, seed=0):
    return probe(shape, dtype, seed).cuda()


def operands(dtype=torch.bfloat16, tokens=TOKENS, n=N, k=K):
    return data((tokens, n), dtype), data((tokens, k), dtype, seed=1)


def outer(dy, x, schedule=None, start=None, fresh=False):
    holds = float("nan") if fresh else 0.0
    buffer = torch.full((dy.shape[1], x.shape[1]), holds, device="cuda")
    buffer = buffer if start is None else start.clone()
    if schedule is None:
        fold_outer(buffer, dy, x, fresh=fresh)
    else:
        launch_outer(buffer, dy, x, fresh, schedule)
    return buffer
