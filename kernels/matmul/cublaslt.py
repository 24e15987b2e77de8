"""The vendor library as a schedule of the matmul order, where its bytes are certified.

cuBLASLt without split K walks K upward into one fp32 accumulator, which is the canonical order; but
its heuristics may hand a shape to a kernel that does not. So a call goes there only with a
certificate: for its layout, dtypes, bias, N, K and power-of-two range of M the library's bytes were
equal to the Triton schedule's, on this device, with this driver and these versions. Certificates
are made on first use and kept in a file; every `AUDIT_EVERY`-th library call is checked again on a
sample of rows.

Shapes: as `matmul`; `outer_from_zero`: dy [T, N], x [T, K] -> out [N, K] fp32.
Dtypes and rounding points: as `matmul`.
Order: `matmul.ORDER`; `outer_from_zero` that of `gradient_fold` from an accumulator of zeros.
Invariant to: as `matmul`.
Varies with: nothing else; a difference found strikes the certificate.
Backward: none.
Errors: none here; `schedule_audit` reports, callers judge. A damaged certificate file warns.
Cost: a certificate takes eight products once per key; an audit one gather of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES
from rl_consistency.kernels.core.recording import PLAIN, unrecorded
from rl_consistency.kernels.matmul.certificates import Certificates, Key
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import prefers_library

AUDIT_EVERY = 257
"""Library calls from one audit to the next: a prime, or the same sites of a step would be audited
again and again."""

ALIGNMENT = 256
"""Bytes an operand starts on: the library chooses by alignment, and certificates are made with
fresh tensors."""

AUDIT_ROWS = 64
"""Rows of a result that an audit computes again."""

PROBE_BYTES = 2**32
"""The most memory that the making of a certificate may take; larger products stay with Triton."""

_CUBLASLT = torch._C._BlasBackend.Cublaslt


@dataclass(frozen=True)
class AuditReport:
    """What sampling found since the process began."""

    calls: int
    """Library calls."""
    audited: int
    """Of these, calls of which a sample of rows was computed again."""
    differing: int
    """Elements of the samples that differed. Anything but 0 breaks the promise."""
    found: int
    """Of these, those found since the report before."""
    struck: list[str]
    """Keys that lost their certificate through it."""


@dataclass
class _Audit:
    calls: int = 0
    audited: int = 0
    differing: int = 0
    struck: list[str] = field(default_factory=list)
    counters: dict[torch.device, Tensor] = field(default_factory=dict)
    pending: set[tuple[torch.device, Key]] = field(default_factory=set)


_audit = _Audit()
_by_device: dict[torch.device, Certificates] = {}
_to_the_row: ContextVar[bool] = ContextVar("certified_to_the_row", default=False)


@contextmanager
def certified_to_the_row() -> Iterator[None]:
    """Compare each product's own number of rows inside the block, beside its range's.

    A CUDA graph takes the library only for such numbers, and no certificate is made while one is
    captured: run once in this block what is captured next.
    """
    token = _to_the_row.set(True)
    try:
        yield
    finally:
        _to_the_row.reset(token)


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor | None:
    """The library's product, or None where it is not the faster schedule or not certified."""
    m, k = a.shape
    n = b.shape[0 if layout == "nt" else 1]
    if not prefers_library(m, n, k, a.dtype, layout) or not settings_in_force():
        return None
    if out_dtype not in (a.dtype, torch.float32) or not (_as_certified(a) and _as_certified(b)):
        return None
    if bias is not None and (out_dtype != a.dtype or not bias.is_contiguous()):
        return None
    key = Key.of(layout, a.dtype, out_dtype, bias is not None, m, n, k)
    capturing = torch.cuda.is_current_stream_capturing()
    if not _admitted(a.device, key, m, capturing):
        return None
    with unrecorded():
        y = library_product(a, b, bias, layout, out_dtype)
        if not capturing and _due(a.device, key):
            rows = _sampled(m, a.device)
            expected = matmul_fwd(a[rows], b, bias, layout, out_dtype)
            _count(a.device, y[rows], expected)
    return y


def outer_from_zero(dy: Tensor, x: Tensor, out: Tensor) -> bool:
    """out [N, K] fp32 <- dy [T, N]^T x [T, K] by the library, where it is certified.

    Returns:
        Whether it was; False leaves `out` as it is.
    """
    (tokens, n), k = dy.shape, x.shape[1]
    if not prefers_library(tokens, n, k, dy.dtype, "tn") or not settings_in_force():
        return False
    if tokens % 16 or not all(_as_certified(matrix) for matrix in (dy, x, out)):
        return False
    key = Key.of("tn", dy.dtype, torch.float32, False, tokens, n, k)
    capturing = torch.cuda.is_current_stream_capturing()
    if not _admitted(dy.device, key, tokens, capturing):
        return False
    with unrecorded():
        library_outer(dy, x, out)
        if not capturing and _due(dy.device, key):
            rows = _sampled(n, dy.device)
            _count(dy.device, out[rows], canonical_outer(dy[:, rows], x))
    return True


def schedule_audit() -> AuditReport:
    """Read the counters (waits for the devices) and strike every key audited since, if any differ.

    Raises nothing: the caller decides what a difference means.
    """
    found = 0
    for counter in _audit.counters.values():
        found += int(counter)
        counter.zero_()
    if found:
        for device, key in sorted(_audit.pending, key=lambda pair: pair[1].name):
            _by_device[device].strike(key, "an audited sample of rows differed")
            _audit.struck.append(key.name)
    _audit.pending.clear()
    _audit.differing += found
    return AuditReport(_audit.calls, _audit.audited, _audit.differing, found, list(_audit.struck))


def settings_in_force() -> bool:
    """Whether the process-wide settings under which certificates are made hold now.

    `numerics.settings.numeric_settings` holds them; without them the library is not used.
    """
    # What `torch.backends.cuda` reads, without its attribute look-ups: this is asked before every
    # product. The reductions are pairs, the second of which allows split K.
    c = torch._C
    return c._get_blas_preferred_backend() == _CUBLASLT and not any(
        (
            *c._get_cublas_allow_bf16_reduced_precision_reduction(),
            *c._get_cublas_allow_fp16_reduced_precision_reduction(),
            c._get_cublas_allow_fp16_accumulation(),
            c._get_cublas_allow_tf32(),
        )
    )


def library_product(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor:
    """The product as the vendor library computes it."""
    right = b.t() if layout == "nt" else b
    if bias is not None:
        return torch.addmm(bias, a, right)
    if out_dtype == a.dtype:
        return torch.mm(a, right)
    return torch.mm(a, right, out_dtype=out_dtype)


def library_outer(dy: Tensor, x: Tensor, out: Tensor) -> None:
    """out <- dy^T x as the vendor library computes it, negative zero as positive zero."""
    torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    out.add_(0.0)


def canonical_outer(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x [N, K] fp32 by the Triton schedule, negative zero as positive zero."""
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


def differing_elements(a: Tensor, b: Tensor) -> Tensor:
    """Number of elements whose bytes differ, two NaN being equal; the host does not wait."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return ((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum()


def _as_certified(matrix: Tensor) -> bool:
    """Whether a matrix lies in memory as those that certificates are made with: rows one after
    another, each on a 16-byte line."""
    columns = matrix.shape[1]
    return (
        type(matrix) in PLAIN
        and matrix.stride() == (columns, 1)
        and columns * matrix.itemsize % DESCRIPTOR_BYTES == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    )


def _admitted(device: torch.device, key: Key, m: int, capturing: bool) -> bool:
    held = certificates(device)
    if not held.knows(key) and (capturing or not _has_room(device, key)):
        return False
    return held.admitted(key, m, make=not capturing, to_the_row=_to_the_row.get())


def _has_room(device: torch.device, key: Key) -> bool:
    """Whether a certificate can be made without running the device out of memory."""
    if key.probe_bytes() > PROBE_BYTES:
        return False
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return key.probe_bytes() <= free // 2


def certificates(device: torch.device) -> Certificates:
    """The certificates of a device, read from its file on first use."""
    if device not in _by_device:
        _by_device[device] = Certificates.of_device(device, lambda key, m: compare(device, key, m))
    return _by_device[device]


def _due(device: torch.device, key: Key) -> bool:
    """Count one library call; whether it is to be audited."""
    _audit.calls += 1
    if _audit.calls % AUDIT_EVERY:
        return False
    _audit.audited += 1
    _audit.pending.add((device, key))
    return True


def _sampled(count: int, device: torch.device) -> Tensor:
    """At most `AUDIT_ROWS` indices spread over `count` rows; they move from audit to audit."""
    number = min(AUDIT_ROWS, count)
    first = _audit.audited * 31 % count
    return (torch.arange(number, device=device) * count // number + first) % count


def _count(device: torch.device, found: Tensor, expected: Tensor) -> None:
    # The first call may be an evaluation's; an inference tensor could not be added to later.
    with torch.inference_mode(False):
        if device not in _audit.counters:
            _audit.counters[device] = torch.zeros((), dtype=torch.int64, device=device)
        _audit.counters[device].add_(differing_elements(found, expected))
