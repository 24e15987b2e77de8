"""The vendor library as a schedule of the matmul order, where its bytes are certified.

cuBLASLt without split K walks K upward into one fp32 accumulator, which is the canonical order. But
its heuristics may give a shape to a kernel that does not. So a call goes to the library only with a
certificate that its bytes were equal to the Triton schedule's: for one layout, dtypes, bias, N, K
and power-of-two range of M. A certificate is made on first use and kept with what else was found on
the device. `audit` computes some calls again, on a sample of rows.

The library is preferred from a number of rows on, which each kind of product states.

Shapes: as `matmul`; `outer_from_zero`: dy [T, N], x [T, K] -> out [N, K] fp32.
Dtypes, rounding points, order, invariance: those of `matmul`, and of `gradient_fold` from zero; a
    difference found withdraws the certificate.
Errors: none; `audit.schedule_audit` reports differences, a damaged file of findings warns.
Cost: eight products once per certificate, 64 rows of one product per audit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from rl_consistency.kernels.core.compile_ahead import compiles_only, require_launches
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES
from rl_consistency.kernels.core.findings import DTYPE_NAMES, findings_of
from rl_consistency.kernels.core.launch import next_power_of_2
from rl_consistency.kernels.core.torch_op import PLAIN
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.audit import differing_elements
from rl_consistency.kernels.matmul.product_triton import matmul_fwd

LIBRARY_ROWS = 129
"""Rows from which the library computes a product. With fewer, a schedule reads the weight about as
fast as memory gives it, and each new weight would cost a certificate."""

LIBRARY_TOKENS = 2048
"""Tokens from which it computes dW. With fewer, it took 1.2 times as long as our own schedules at
random shapes on an H200; with more, 0.92 times."""

ALIGNMENT = 256
"""Bytes. The library chooses its kernel by alignment, and certificates are made with fresh tensors,
which start on a multiple of this."""

_CUBLASLT = torch._C._BlasBackend.Cublaslt

_to_the_row: ContextVar[bool] = ContextVar("certified_to_the_row", default=False)


@dataclass(frozen=True)
class Key:
    """What one certificate covers."""

    layout: str
    """"nt", "nn", or "tn" for dW (its rows are tokens); `experts.library` has others."""
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    n: int
    k: int
    rows: int
    """The largest number of rows; the range begins at half of it plus one."""

    most_bytes = 2**32
    """The most memory that making a certificate may take; larger products stay with Triton."""

    @classmethod
    def of(
        cls, layout: str, dtype: torch.dtype, out_dtype: torch.dtype, bias: bool, *mnk: int
    ) -> Key:
        """The key of one product; `mnk` is M, N, K."""
        m, n, k = mnk
        return _key(layout, dtype, out_dtype, bias, n, k, next_power_of_2(m))

    @cached_property
    def name(self) -> str:
        """How files spell the key."""
        dtypes = f"{DTYPE_NAMES[self.dtype]}/{DTYPE_NAMES[self.out_dtype]}"
        bias = "bias" if self.bias else "plain"
        return f"{self.layout}/{dtypes}/{bias}/n{self.n}/k{self.k}/m{self.rows}"

    def sample(self, m: int) -> list[int]:
        """Numbers of rows to compare: the range's ends, its middle and `m`."""
        low = max(self.rows // 2 + 1, 2)
        counts = {low, (low + self.rows) // 2, self.rows, m}
        # Certificates of dW cover whole steps of the fold only.
        return sorted(c for c in counts if self.layout != "tn" or c % 16 == 0)

    def probe_bytes(self) -> int:
        """Memory of a comparison with the most rows."""
        shapes = (self.rows, self.k), (self.n, self.k), (self.rows, self.n)
        if self.layout == "tn":
            shapes = (self.rows, self.n), (self.rows, self.k), (self.n, self.k)
        a, b, y = (rows * columns for rows, columns in shapes)
        return (a + b) * self.dtype.itemsize * 2 + y * self.out_dtype.itemsize * 4

    def compare(self, device: torch.device, m: int) -> int:
        """Elements that differ between the library and Triton on fresh data of `m` rows."""
        return compare(device, self, m)


_key = cache(Key)
"""One object per key, so that its name is computed once."""


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


def prefers_library(rows: int, least: int, dtype: torch.dtype) -> bool:
    """Whether so many rows go to the library, which has `least`, if it is certified for them."""
    return rows >= least and dtype != torch.float32


def certified(device: torch.device, key: Key, m: int) -> bool:
    """Whether the library may compute a product of `m` rows; makes a missing certificate.

    Nothing is compared while a CUDA graph is captured. Nothing audits its replays either, so only
    numbers of rows that were compared are admitted there.

    RuntimeError while kernels compile ahead: nothing would be compared.
    """
    held, capturing = findings_of(device), torch.cuda.is_current_stream_capturing()
    if not capturing and not _to_the_row.get() and held.certifies(key.name):
        return True
    found, rows = held.certificate(key.name), []
    if found is None and not capturing and not held.refuses(key.name):
        rows = key.sample(m) if _has_room(device, key) else []
    elif found is not None and not capturing and held.certifies(key.name):
        rows = [m] if m not in found.rows else []
    if rows:
        require_launches("a certificate")
        held.certify(key.name, sum(key.compare(device, count) for count in rows), rows)
    found = held.certificate(key.name)
    if found is None or not held.certifies(key.name):
        return False
    return not capturing or m in found.rows


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor | None:
    """The library's product, or None if it is not preferred or not certified."""
    (m, k), dtype = a.shape, a.dtype
    if not _admits(m, LIBRARY_ROWS, a, b) or out_dtype not in (dtype, torch.float32):
        return None
    if bias is not None and (out_dtype != dtype or not bias.is_contiguous()):
        return None
    n = b.shape[0 if layout == "nt" else 1]
    key = Key.of(layout, dtype, out_dtype, bias is not None, m, n, k)
    if not certified(a.device, key, m):
        return None

    def again(y: Tensor) -> tuple[Tensor, Tensor]:
        rows = audit.sampled_rows(m, a.device)
        return y[rows], matmul_fwd(a[rows], b, bias, layout, out_dtype)

    return audit.sample(key.name, partial(library_product, a, b, bias, layout, out_dtype), again)


def outer_from_zero(dy: Tensor, x: Tensor, out: Tensor) -> bool:
    """out [N, K] fp32 <- dy [T, N]^T x [T, K] by the library, if it is preferred and certified.

    Returns whether the library did it; False leaves `out` as it was.
    """
    (tokens, n), k = dy.shape, x.shape[1]
    if torch.compiler.is_compiling() or not _admits(tokens, LIBRARY_TOKENS, dy, x, out):
        return False
    if tokens % 16:
        return False
    key = Key.of("tn", dy.dtype, torch.float32, False, tokens, n, k)
    if not certified(dy.device, key, tokens):
        return False

    def again(out: Tensor) -> tuple[Tensor, Tensor]:
        rows = audit.sampled_rows(n, dy.device)
        return out[rows], canonical_outer(dy[:, rows], x)

    audit.sample(key.name, partial(library_outer, dy, x, out), again)
    return True


def _admits(rows: int, least: int, *operands: Tensor) -> bool:
    """Whether a product of so many rows may ask for its certificate: the library is preferred, and
    settings and operands are like those of certificates."""
    if not prefers_library(rows, least, operands[0].dtype) or not settings_in_force():
        return False
    # What comparisons and audits launch is compiled, at the rows of other calls.
    return all(map(_as_certified, operands)) and not compiles_only()


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


def library_outer(dy: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """out <- dy^T x by the vendor library, with -0 turned into +0."""
    torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    return out.add_(0.0)


def canonical_outer(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x [N, K] fp32 by the Triton schedule, with -0 turned into +0."""
    return matmul_fwd(dy.t(), x, None, "nn", torch.float32).add_(0.0)


def compare(device: torch.device, key: Key, m: int) -> int:
    """Elements that differ between the library and Triton on fresh probe data of `m` rows."""
    fresh = partial(probe, torch.Generator(device).manual_seed(m), key.dtype)
    if key.layout == "tn":
        dy, x = fresh(m, key.n), fresh(m, key.k)
        y = library_outer(dy, x, torch.empty(key.n, key.k, device=device))
        return int(differing_elements(y, canonical_outer(dy, x)))
    a = fresh(m, key.k)
    b = fresh(key.n, key.k) if key.layout == "nt" else fresh(key.k, key.n)
    bias = fresh(1, key.n)[0] if key.bias else None
    operands = a, b, bias, key.layout, key.out_dtype
    return int(differing_elements(library_product(*operands), matmul_fwd(*operands)))


def probe(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal values with outlier channels: partial sums cancel and round at many scales."""
    values = torch.randn(*shape, dtype=dtype, device=generator.device, generator=generator)
    values[..., ::37] *= 30.0
    return values


def lies_as_certified(tensor: Tensor) -> bool:
    """Whether a tensor begins where those of certificates do and keeps its values itself."""
    return type(tensor) in PLAIN and not tensor.data_ptr() % ALIGNMENT


def _as_certified(matrix: Tensor) -> bool:
    """Whether a matrix lies in memory like those of certificates: contiguous, 16-byte rows."""
    if not lies_as_certified(matrix):
        return False
    pitch, element = matrix.stride()
    columns = matrix.shape[1]
    return element == 1 and pitch == columns and columns * matrix.itemsize % DESCRIPTOR_BYTES == 0


def _has_room(device: torch.device, key: Key) -> bool:
    """Whether the device has the memory to make a certificate."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return key.probe_bytes() <= min(free // 2, key.most_bytes)
