"""The sampled audit of products by a winner of `tune`.

A winner comes from a file, which says that its bytes were equal when it was measured. So some rows
of its products are computed again, by the schedule for any GPU and any operands. A winner that
differs is struck, in the file too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import unrecorded
from rl_consistency.kernels.core.cache.tuned_schedules import picked_once, tuned_schedules
from rl_consistency.kernels.core.device import has_tma, takes_descriptors
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, as_read, matmul_fwd
from rl_consistency.kernels.matmul.schedules import pick, product_work


@dataclass(frozen=True)
class TunedProduct:
    """A product by a winner, as the audit knows it."""

    device: torch.device
    work: str
    schedule: str

    @property
    def name(self) -> str:
        """Work and schedule."""
        return f"{self.work}: {self.schedule}"

    def strike(self, reason: str) -> None:
        """Withdraw the winner."""
        tuned_schedules(self.device).strike(self.work, self.schedule, reason)


def audit_winner(a: Tensor, b: Tensor, bias: Tensor | None, layout: str, y: Tensor) -> None:
    """Compute some rows of y = a b + bias again, if a winner computed it and an audit is due.

    Operands are those of `matmul_fwd`, without gradients. Nothing is computed while a CUDA graph is
    captured.
    """
    if tuned_schedules(a.device).is_empty:
        return
    (m, k), n = a.shape, y.shape[1]
    b, layout = as_read(b, layout)
    tma = a.dtype != torch.float32 and has_tma(a.device) and takes_descriptors(a, b, y)
    tuned = _tuned_product(m, n, k, a.dtype, layout, tma, y.dtype, a.device)
    if tuned is None or _capturing(a.device) or not audit.due():
        return
    rows = audit.sampled_rows(m, a.device)
    plain = pick(len(rows), n, k, a.dtype, layout, False, y.dtype)
    fitting = plain.within(SHARED_BYTES, a.element_size(), y.element_size())
    with unrecorded():
        expected = matmul_fwd(a[rows], b, bias, layout, y.dtype, fitting)
        audit.record(tuned, y[rows], expected)


@picked_once
def _tuned_product(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str, tma: bool, out_dtype: torch.dtype,
    device: torch.device,
) -> TunedProduct | None:  # fmt: skip
    work = product_work(layout, dtype, out_dtype, tma, m, n, k)
    winner = tuned_schedules(device).winner(work)
    return None if winner is None else TunedProduct(device, work, winner.schedule)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
