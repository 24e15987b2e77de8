"""The vendor library as a schedule of the matmul order, where its bytes are certified.

cuBLASLt without split K walks K upward into one fp32 accumulator, which is the canonical order. But
its heuristics may give a shape to a kernel that does not. So a call goes to the library only with a
certificate (see `certificates`) that its bytes were equal to the Triton schedule's. A certificate
is made on first use and kept in a file. `audit` checks some calls again on a sample of rows.

Shapes: as `matmul`; `outer_from_zero`: dy [T, N], x [T, K] -> out [N, K] fp32.
Dtypes and rounding points: as `matmul`.
Order: `matmul.ORDER`; for `outer_from_zero` that of `gradient_fold` from zero.
Invariant to, varies with: as `matmul`; a difference found strikes the certificate.
Backward: none.
Errors: none; `audit.schedule_audit` reports differences, a damaged certificate file warns.
Cost: eight products once per certificate, twelve more for one of dW, 64 rows of one product per
    audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import PLAIN, unrecorded
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES
from rl_consistency.kernels.core.race import time_ratio
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.audit import differing_elements
from rl_consistency.kernels.matmul.certificates import Certificates, Certified, Key
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import prefers_library, tuned_preference

ALIGNMENT = 256
"""Bytes. The library chooses its kernel by alignment, and certificates are made with fresh tensors,
which start on a multiple of this."""

PROBE_BYTES = 2**32
"""The most memory that making a certificate may take; larger products stay with Triton."""

_CUBLASLT = torch._C._BlasBackend.Cublaslt


_by_device: dict[torch.device, Certificates] = {}
"""Process-wide: the certificates of each device."""

_to_the_row: ContextVar[bool] = ContextVar("certified_to_the_row", default=False)


@contextmanager
def certified_to_the_row() -> Iterator[None]:
    """Inside the block, certificates also compare each product's own number of rows.

    Run in this block what you capture next. A CUDA graph uses the library only for numbers of rows
    that were compared, and nothing is compared during capture.
    """
    token = _to_the_row.set(True)
    try:
        yield
    finally:
        _to_the_row.reset(token)


def to_the_row() -> bool:
    """Whether the code runs inside `certified_to_the_row`."""
    return _to_the_row.get()


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor | None:
    """The library's product, or None if it is not faster or not certified."""
    m, k = a.shape
    dtype, device = a.dtype, a.device
    n = b.shape[0 if layout == "nt" else 1]
    if not prefers_library(m, n, k, dtype, layout, out_dtype, device):
        return None
    if not settings_in_force():
        return None
    if out_dtype not in (dtype, torch.float32) or not (_as_certified(a) and _as_certified(b)):
        return None
    if bias is not None and (out_dtype != dtype or not bias.is_contiguous()):
        return None
    if compiles_only():
        return None  # what comparisons and audits launch is compiled, not the product of one
    key = Key.of(layout, dtype, out_dtype, bias is not None, m, n, k)
    capturing = torch.cuda.is_current_stream_capturing()
    if not _admitted(device, key, m, capturing):
        return None
    with unrecorded():
        y = library_product(a, b, bias, layout, out_dtype)
        if not capturing and audit.due():
            rows = audit.sampled_rows(m, a.device)
            expected = matmul_fwd(a[rows], b, bias, layout, out_dtype)
            audit.record(Certified(certificates(a.device), key), y[rows], expected)
    return y


def outer_from_zero(dy: Tensor, x: Tensor, out: Tensor, own: Callable[[], None]) -> bool:
    """out [N, K] fp32 <- dy [T, N]^T x [T, K] by the library, if it is faster and certified.

    `own` computes the same by our own schedule. Where `tune` has not measured the two they are
    raced once for each certificate, since no rule tells which kernel the library will choose.
    Returns whether the library did it; False leaves `out` with anything in it.
    """
    if torch.compiler.is_compiling() or compiles_only():
        return False
    (tokens, n), k = dy.shape, x.shape[1]
    if not prefers_library(tokens, n, k, dy.dtype, "tn", torch.float32, dy.device):
        return False
    if not settings_in_force():
        return False
    if tokens % 16 or not all(_as_certified(matrix) for matrix in (dy, x, out)):
        return False
    key = Key.of("tn", dy.dtype, torch.float32, False, tokens, n, k)
    capturing = torch.cuda.is_current_stream_capturing()
    if not _admitted(dy.device, key, tokens, capturing):
        return False
    if tuned_preference(tokens, n, k, dy.dtype, "tn", torch.float32, dy.device) is None:
        race = None if capturing else partial(time_ratio, own, lambda: library_outer(dy, x, out))
        with unrecorded():
            if not certificates(dy.device).pays(key, race):
                return False
    with unrecorded():
        library_outer(dy, x, out)
        if not capturing and audit.due():
            rows = audit.sampled_rows(n, dy.device)
            expected = canonical_outer(dy[:, rows], x)
            audit.record(Certified(certificates(dy.device), key), out[rows], expected)
    return True


def settings_in_force() -> bool:
    """Whether the process-wide settings that certificates are made under hold now.

    `numerics.settings.numeric_settings` sets them. Without them the library is not used.
    """
    # These are the getters behind `torch.backends.cuda`: every product asks, and attributes are
    # slower. A reduction's setting is a pair; its second value allows split K.
    c = torch._C
    return (
        c._get_blas_preferred_backend() == _CUBLASLT
        and not any(c._get_cublas_allow_bf16_reduced_precision_reduction())
        and not any(c._get_cublas_allow_fp16_reduced_precision_reduction())
        and not c._get_cublas_allow_fp16_accumulation()
        and not c._get_cublas_allow_tf32()
    )


def library_product(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor:
    """The vendor library's product."""
    right = b.t() if layout == "nt" else b
    if bias is not None:
        return torch.addmm(bias, a, right)
    if out_dtype == a.dtype:
        return torch.mm(a, right)
    return torch.mm(a, right, out_dtype=out_dtype)


def library_outer(dy: Tensor, x: Tensor, out: Tensor) -> None:
    """out <- dy^T x by the vendor library, with -0 turned into +0."""
    torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    out.add_(0.0)


def canonical_outer(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x [N, K] fp32 by the Triton schedule, with -0 turned into +0."""
    return matmul_fwd(dy.t(), x, None, "nn", torch.float32).add_(0.0)


def compare(
    device: torch.device,
    key: Key,
    m: int,
    *,
    library: Callable[..., Tensor] = library_product,
    outer: Callable[[Tensor, Tensor, Tensor], None] = library_outer,
) -> int:
    """Elements that differ between the library and Triton on fresh probe data of `m` rows."""
    generator = torch.Generator(device).manual_seed(m)

    def fresh(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, device=device, generator=generator)
        # Outlier channels make partial sums cancel and round at many scales.
        values[:, ::37] *= 30.0
        return values.to(key.dtype)

    if key.layout == "tn":
        dy, x = fresh(m, key.n), fresh(m, key.k)
        y = torch.empty(key.n, key.k, device=device)
        outer(dy, x, y)
        return int(differing_elements(y, canonical_outer(dy, x)))
    a = fresh(m, key.k)
    b = fresh(key.n, key.k) if key.layout == "nt" else fresh(key.k, key.n)
    bias = fresh(1, key.n)[0] if key.bias else None
    expected = matmul_fwd(a, b, bias, key.layout, key.out_dtype)
    return int(differing_elements(library(a, b, bias, key.layout, key.out_dtype), expected))


def _as_certified(matrix: Tensor) -> bool:
    """Whether a matrix lies in memory like those of certificates: contiguous, 16-byte rows."""
    if type(matrix) not in PLAIN or matrix.data_ptr() % ALIGNMENT:
        return False
    pitch, element = matrix.stride()
    columns = matrix.shape[1]
    return element == 1 and pitch == columns and columns * matrix.itemsize % DESCRIPTOR_BYTES == 0


def _admitted(device: torch.device, key: Key, m: int, capturing: bool) -> bool:
    held, exact = certificates(device), to_the_row()
    if not capturing and not exact and held.holds(key):
        return True
    if not held.knows(key) and (capturing or not _has_room(device, key)):
        return False
    return held.admitted(key, m, make=not capturing, to_the_row=exact)


def _has_room(device: torch.device, key: Key) -> bool:
    """Whether the device has the memory to make a certificate."""
    if key.probe_bytes() > PROBE_BYTES:
        return False
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return key.probe_bytes() <= free // 2


def certificates(device: torch.device) -> Certificates:
    """The certificates of a device; the first call reads them from its file."""
    held = _by_device.get(device)
    if held is None:
        held = Certificates.of_device(device, "matmul", lambda key, m: compare(device, key, m))
        _by_device[device] = held
    return held
