"""torch's grouped product as a schedule of the experts' products, where its bytes are certified.

It walks K upward into one fp32 accumulator for each expert's rows, which is the canonical order. As
with the products of `matmul`, a call goes there only with a certificate that its bytes were equal
to our own schedule's, for even and for skewed routing; `matmul.audit` computes some calls again.

Shapes: a [P, K] by pair, weights [E, N, K] ("nt") or [E, K, N] ("nn") -> [P, N].
Dtypes and rounding points: bf16, as `linear`. Order: `matmul.ORDER`.
Invariant to, varies with: as `linear`; a difference found withdraws the certificate.
Backward: none. Errors: none. Cost: sixteen products once per certificate, one more per audit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES, has_wgmma
from rl_consistency.kernels.core.launch import next_power_of_2
from rl_consistency.kernels.experts.products_triton import product_fwd
from rl_consistency.kernels.experts.schedules import LIBRARY_PAIRS
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.cublaslt import (
    Key,
    certified,
    lies_as_certified,
    prefers_library,
    probe,
    settings_in_force,
)


@dataclass(frozen=True)
class GroupedKey(Key):
    """What one certificate of a grouped product covers; `rows` are pairs."""

    experts: int = 0

    most_bytes = 2**62
    """No limit but the device's memory."""

    def probe_bytes(self) -> int:
        """Memory of a comparison with the most pairs."""
        values = 2 * self.experts * self.n * self.k + 6 * self.rows * (self.n + self.k)
        return self.dtype.itemsize * values

    def compare(self, device: torch.device, m: int) -> int:
        """Elements that differ between the library and Triton on fresh probe data of m pairs,
        routed evenly and with most pairs at few experts."""
        fresh = partial(probe, torch.Generator(device).manual_seed(m), self.dtype)
        layout, experts = self.layout.split("-")[1], self.experts
        a = fresh(m, self.k)
        weights = fresh(experts, *((self.n, self.k) if layout == "nt" else (self.k, self.n)))
        differing = 0
        for skew in (0.0, 1.5):
            shares = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
            own = (shares / shares.sum() * m).long()
            own[0] += m - own.sum()
            first = F.pad(own.cumsum(0), (1, 0)).to(device, torch.int32)
            operands = a, weights, layout, first
            differing += int(audit.differing_elements(library_product(*operands), _own(*operands)))
        return differing


def takes(weights: Tensor, layout: str, pairs: int) -> bool:
    """Whether products of so many pairs go to the library: it is preferred, and has a certificate.
    A missing certificate is made now, unless a CUDA graph is captured."""
    device = weights.device
    if torch.compiler.is_compiling() or weights.dtype != torch.bfloat16 or not has_wgmma(device):
        return False
    if not prefers_library(pairs, LIBRARY_PAIRS * len(weights), weights.dtype):
        return False
    if not settings_in_force() or not _as_certified(weights):
        return False
    return not compiles_only() and certified(device, key_of(weights, layout, pairs), pairs)


def grouped_product(a: Tensor, weights: Tensor, layout: str, first: Tensor) -> Tensor:
    """a [P, K] times the weights of each pair's expert, where `takes` says so; rows past the last
    pair, `first[E]`, hold anything."""
    operands = a, weights, layout, first

    def again(y: Tensor) -> tuple[Tensor, Tensor]:
        past = torch.arange(len(y), device=y.device)[:, None] >= first[-1]
        return y.masked_fill(past, 0.0), _own(*operands).masked_fill(past, 0.0)

    name = key_of(weights, layout, len(a)).name
    return audit.sample(name, partial(library_product, *operands), again)


def library_product(a: Tensor, weights: Tensor, layout: str, first: Tensor) -> Tensor:
    """The library's product."""
    right = weights.transpose(1, 2) if layout == "nt" else weights
    return F.grouped_mm(a, right, offs=first[1:])


def key_of(weights: Tensor, layout: str, pairs: int) -> GroupedKey:
    """What one certificate covers; the layout's name holds the number of experts."""
    experts, *sizes = weights.shape
    n, k = sizes if layout == "nt" else reversed(sizes)
    return _key(layout, weights.dtype, n, k, next_power_of_2(pairs), experts)


@cache
def _key(layout: str, dtype: torch.dtype, n: int, k: int, rows: int, experts: int) -> GroupedKey:
    return GroupedKey(f"grouped-{layout}-e{experts}", dtype, dtype, False, n, k, rows, experts)


def _own(a: Tensor, weights: Tensor, layout: str, first: Tensor) -> Tensor:
    # By pair, the kernel reads no pairs; their number is that of the result's rows.
    pairs = first.new_empty(len(a))
    return product_fwd(a, weights, layout, first, pairs, 1, False)


def _as_certified(weights: Tensor) -> bool:
    """Whether weights lie in memory like those of certificates."""
    whole = all(n * weights.itemsize % DESCRIPTOR_BYTES == 0 for n in weights.shape[1:])
    return whole and lies_as_certified(weights) and weights.is_contiguous()
