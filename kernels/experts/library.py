"""torch's grouped product as a schedule of the experts' products, where its bytes are certified.

It walks K upward into one fp32 accumulator for each expert's rows, which is the canonical order. As
with the products of `matmul`, a call goes there only with a certificate that its bytes were equal
to our own schedule's, for even and for skewed routing. A certificate is made on first use and kept
in a file; `matmul.audit` computes some calls again.

Shapes: a [P, K] by pair, weights [E, N, K] ("nt") or [E, K, N] ("nn") -> [P, N].
Dtypes and rounding points: bf16, as `linear`. Order: `matmul.ORDER`.
Invariant to, varies with: as `linear`; a difference found strikes the certificate.
Backward: none. Errors: none. Cost: sixteen products once per certificate, one more per audit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.core.autograd import PLAIN, unrecorded
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES, has_wgmma
from rl_consistency.kernels.experts.products_triton import product_fwd
from rl_consistency.kernels.experts.schedules import Product, prefers_library
from rl_consistency.kernels.experts.winner_audit import pairs_of
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.audit import differing_elements
from rl_consistency.kernels.matmul.certificates import Certificates, Certified, Key
from rl_consistency.kernels.matmul.cublaslt import ALIGNMENT, settings_in_force, to_the_row

_by_device: dict[torch.device, Certificates] = {}
"""Process-wide: the certificates of each device."""


def takes(weights: Tensor, product: Product, pairs: int) -> bool:
    """Whether products of so many pairs go to the library: it is expected to be faster, and has a
    certificate. A missing certificate is made now, unless a CUDA graph is captured."""
    device = weights.device
    if torch.compiler.is_compiling() or weights.dtype != torch.bfloat16 or not has_wgmma(device):
        return False
    key = key_of(weights, "nn" if product == "nn" else "nt", pairs)
    n = key.n // 2 if product == "gate_up" else key.n
    if not prefers_library(product, pairs, len(weights), n, key.k, key.dtype, device):
        return False
    if not settings_in_force() or not _as_certified(weights):
        return False
    if compiles_only():
        return False
    held = certificates(device)
    capturing = torch.cuda.is_current_stream_capturing()
    if not held.knows(key) and (capturing or not _has_room(weights, pairs)):
        return False
    return held.admitted(key, pairs, make=not capturing, to_the_row=to_the_row())


def grouped_product(a: Tensor, weights: Tensor, layout: str, first: Tensor) -> Tensor:
    """a [P, K] times the weights of each pair's expert, where `takes` says so; rows past the last
    pair, `first[E]`, hold anything."""
    with unrecorded():
        y = library_product(a, weights, layout, first)
        if not torch.cuda.is_current_stream_capturing() and audit.due():
            expected = _own(a, weights, layout, first)
            key = key_of(weights, layout, len(a))
            certified = Certified(certificates(a.device), key)
            audit.record(certified, *(pairs_of(x, first) for x in (y, expected)))
    return y


def library_product(a: Tensor, weights: Tensor, layout: str, first: Tensor) -> Tensor:
    """The library's product."""
    right = weights.transpose(1, 2) if layout == "nt" else weights
    return F.grouped_mm(a, right, offs=first[1:])


def key_of(weights: Tensor, layout: str, pairs: int) -> Key:
    """What one certificate covers; the layout's name holds the number of experts."""
    experts, *sizes = weights.shape
    n, k = sizes if layout == "nt" else reversed(sizes)
    dtype = weights.dtype
    return Key.of(f"grouped-{layout}-e{experts}", dtype, dtype, False, pairs, n, k)


def compare(
    device: torch.device,
    key: Key,
    pairs: int,
    library: Callable[[Tensor, Tensor, str, Tensor], Tensor] = library_product,
) -> int:
    """Elements that differ between the library and Triton on fresh probe data, routed evenly and
    with most pairs at few experts."""
    _, layout, experts = key.layout.split("-")
    count = int(experts.removeprefix("e"))
    generator = torch.Generator(device).manual_seed(pairs)

    def fresh(*shape: int) -> Tensor:
        values = torch.randn(*shape, device=device, generator=generator, dtype=key.dtype)
        # Outlier channels make partial sums cancel and round at many scales.
        values[..., ::37] *= 30.0
        return values

    a = fresh(pairs, key.k)
    weights = fresh(count, *((key.n, key.k) if layout == "nt" else (key.k, key.n)))
    differing = 0
    for skew in (0.0, 1.5):
        shares = torch.arange(1, count + 1, dtype=torch.float64) ** -skew
        own = (shares / shares.sum() * pairs).long()
        own[0] += pairs - own.sum()
        first = F.pad(own.cumsum(0), (1, 0)).to(device, torch.int32)
        found = library(a, weights, layout, first)
        differing += int(differing_elements(found, _own(a, weights, layout, first)))
    return differing


def _own(a: Tensor, weights: Tensor, layout: str, first: Tensor) -> Tensor:
    # By pair, the kernel reads no pairs; their number is that of the result's rows.
    pairs = first.new_empty(len(a))
    return product_fwd(a, weights, layout, first, pairs, 1, False)


def _as_certified(weights: Tensor) -> bool:
    """Whether weights lie in memory like those of certificates."""
    if type(weights) not in PLAIN or weights.data_ptr() % ALIGNMENT:
        return False
    widths = weights.shape[1] * weights.itemsize, weights.shape[2] * weights.itemsize
    return weights.is_contiguous() and not any(width % DESCRIPTOR_BYTES for width in widths)


def _has_room(weights: Tensor, pairs: int) -> bool:
    """Whether the device has the memory to make a certificate."""
    rows = 2 * pairs * (3 * weights.shape[1] + 3 * weights.shape[2])
    wanted = weights.itemsize * (2 * weights.numel() + rows)
    free, _ = torch.cuda.mem_get_info(weights.device)
    free += torch.cuda.memory_reserved(weights.device)
    free -= torch.cuda.memory_allocated(weights.device)
    return wanted <= free // 2


def certificates(device: torch.device) -> Certificates:
    """The certificates of a device; the first call reads them from its file."""
    held = _by_device.get(device)
    if held is None:
        held = Certificates.of_device(
            device, "experts", lambda key, pairs: compare(device, key, pairs)
        )
        _by_device[device] = held
    return held
