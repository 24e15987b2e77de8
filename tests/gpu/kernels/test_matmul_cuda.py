from dataclasses import replace
from functools import partial

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.cublaslt import Key
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, matmul_fwd
from rl_consistency.kernels.matmul.schedules import CANDIDATES, DECODE, POINTER, POINTER_FP32
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_certificates(monkeypatch, tmp_path):
    """No certificate of this machine is read, none of a test is left on it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(findings_module, "_by_device", {})
    monkeypatch.setattr(audit, "_counts", audit._Counts())


def operands(m, n, k, dtype=torch.bfloat16):
    a = probe((m, k), dtype, scale=0.25).to(DEVICE)
    b = probe((n, k), dtype, seed=1, scale=k**-0.5).to(DEVICE)
    return a, b, probe((n,), dtype, seed=2).to(DEVICE)


def schedules(dtype, out_dtype):
    if dtype == torch.float32:
        return POINTER_FP32
    usable = CANDIDATES if has_tma(DEVICE) else POINTER
    return [s.within(SHARED_BYTES, dtype.itemsize, out_dtype.itemsize) for s in usable]


def differing_calls(op, a):
    """Calls on some of the rows of a [300, K] whose result differs from the whole's."""
    whole = op(a)
    indices = [[i] for i in (0, 1, 15, 16, 127, 128, 299)]
    indices += [range(n) for n in (2, 7, 16, 17, 33, 64, 65, 129, 256)] + [range(5, 40)]
    indices += [torch.randperm(300, generator=torch.Generator().manual_seed(0)), [3] * 20]
    return sum(not same_bytes(op(a[list(i)]), whole[list(i)]) for i in indices)


def relative_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def stock_product(a, b, bias=None):
    """torch's a b^T + bias."""
    return torch.nn.functional.linear(a, b, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 4096, 4096), (64, 1024, 3072), (700, 500, 1000)])
def test_errs_no_more_than_the_library(m, n, k, dtype, record_property):
    a, b, bias = operands(m, n, k, dtype)
    transposed = b.t().contiguous()
    exact = a.double() @ b.double().t()
    allowed = ERROR_GROWTH_LIMIT * relative_error(stock_product(a, b), exact)
    assert relative_error(matmul_nt(a, b, out_dtype=dtype), exact) <= allowed
    assert relative_error(matmul_nn(a, transposed, out_dtype=dtype), exact) <= allowed
    biased = exact + bias.double()
    allowed = ERROR_GROWTH_LIMIT * relative_error(stock_product(a, b, bias), biased)
    assert relative_error(matmul_nt(a, b, bias=bias, out_dtype=dtype), biased) <= allowed
    wide = matmul_nt(a, b)
    assert same_bytes(wide.to(dtype), matmul_nt(a, b, out_dtype=dtype))
    if dtype == torch.float32:
        return
    unrounded = relative_error(torch.mm(a, b.t(), out_dtype=torch.float32), exact)
    record_property("fp32 error / library's", relative_error(wide, exact) / unrounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("k", [104, 1000, 4096, 14336])
def test_every_schedule_gives_the_same_bytes(dtype, layout, k):
    a, b, bias = operands(300, 392, k, dtype)
    b = b if layout == "nt" else b.t().contiguous()
    for out_dtype in {torch.float32, dtype}:
        expected = matmul_fwd(a, b, bias, layout, out_dtype, schedules(dtype, out_dtype)[-1])
        for schedule in schedules(dtype, out_dtype):
            y = matmul_fwd(a, b, bias, layout, out_dtype, schedule)
            assert same_bytes(y, expected), schedule.name


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes_rounds_one_accumulator_once(dtype, out_dtype):
    """Few rows and many, by what is picked and by a schedule of each kind."""
    a, b, bias = operands(300, 392, 104, dtype)
    transposed = b.t().contiguous()
    choices = {s.kind: s for s in schedules(dtype, out_dtype)}.values()
    wide, biased = matmul_nt(a, b), matmul_nt(a, b, bias=bias)
    for rows in (1, 40, 300):
        part, rounded = a[:rows], wide[:rows].to(out_dtype)
        assert same_bytes(matmul_nt(part, b, out_dtype=out_dtype), rounded)
        assert same_bytes(matmul_nn(part, transposed, out_dtype=out_dtype), rounded)
        for schedule in choices:
            found = matmul_fwd(part, b, bias, "nt", out_dtype, schedule)
            assert same_bytes(found, biased[:rows].to(out_dtype)), schedule.name


@pytest.mark.parametrize("dtype", HALVES)
def test_both_layouts_give_the_same_bytes(dtype):
    a, b, _ = operands(300, 392, 1024, dtype)
    assert same_bytes(matmul_nn(a, b.t().contiguous()), matmul_nt(a, b))
    assert same_bytes(matmul_nn(a, b.t()), matmul_nt(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1024, 1024), (1024, 3072), (4096, 1024), (392, 1000)])
def test_rows_do_not_depend_on_the_batch(n, k, dtype):
    a, b, bias = operands(300, n, k, dtype)
    transposed = b.t().contiguous()
    with numeric_settings():
        for out in {torch.float32, dtype}:
            assert differing_calls(partial(matmul_nt, b=b, out_dtype=out), a) == 0
            assert differing_calls(partial(matmul_nn, b=transposed, out_dtype=out), a) == 0
        assert differing_calls(lambda r: matmul_nt(r, b, bias=bias, out_dtype=dtype), a) == 0


def test_a_prefix_of_many_rows_keeps_its_bytes():
    a, b, _ = operands(8192, 1024, 1024)
    with numeric_settings():
        whole = matmul_nt(a, b, out_dtype=torch.bfloat16)
        for m in (1, 2, 3, 5, 8, 13, 31, 64, 100, 255, 256, 511, 1000, 2048, 4095, 8191):
            assert same_bytes(matmul_nt(a[:m], b, out_dtype=torch.bfloat16), whole[:m]), m


def test_neighbours_of_any_value_do_not_matter():
    a, b, _ = operands(100, 256, 512)
    junk = torch.tensor([float("nan"), float("inf"), -1e30], device=DEVICE)[:, None]
    junk = junk.expand(3, 512).to(a.dtype)
    padded = matmul_nt(torch.cat([junk, a, junk]), b)
    assert same_bytes(padded[3:-3], matmul_nt(a, b))


def test_a_repeated_call_gives_the_same_bytes():
    a, b, _ = operands(512, 1024, 4096)
    first = matmul_nt(a, b)
    assert all(same_bytes(matmul_nt(a, b), first) for _ in range(10))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_and_alignment_of_the_operands_do_not_matter(dtype):
    a, b, _ = operands(70, 128, 256, dtype)
    expected = matmul_nt(a, b)
    assert same_bytes(matmul_nt(a.t().contiguous().t(), b), expected)
    assert same_bytes(matmul_nt(a, b.t().contiguous().t()), expected)
    shifted = torch.empty(a.numel() + 1, dtype=dtype, device=DEVICE)[1:].view_as(a).copy_(a)
    assert same_bytes(matmul_nt(shifted, b), expected)
    shifted = torch.empty(b.numel() + 1, dtype=dtype, device=DEVICE)[1:].view_as(b).copy_(b)
    assert same_bytes(matmul_nt(a, shifted), expected)
    wide = torch.zeros(70, 300, dtype=dtype, device=DEVICE)
    wide[:, 7:263] = a
    assert same_bytes(matmul_nt(wide[:, 7:263], b), expected)
    row = a[:1].expand(70, 256)
    assert same_bytes(matmul_nt(row, b), expected[:1].expand(70, 128))


@pytest.mark.parametrize("m, k, n", [(0, 5, 4), (3, 5, 0), (0, 5, 0)])
def test_a_product_without_elements_is_empty(m, k, n):
    a = torch.zeros(m, k, device=DEVICE)
    assert matmul_nt(a, torch.zeros(n, k, device=DEVICE)).shape == (m, n)
    assert matmul_nn(a, torch.zeros(k, n, device=DEVICE)).shape == (m, n)


def test_a_product_over_nothing_is_zero_plus_the_bias():
    a, b = torch.zeros(3, 0, device=DEVICE), torch.zeros(4, 0, device=DEVICE)
    bias = torch.arange(4.0, device=DEVICE)
    assert same_bytes(matmul_nt(a, b), torch.zeros(3, 4, device=DEVICE))
    assert same_bytes(matmul_nt(a, b, bias=bias), bias.expand(3, 4))
    assert same_bytes(matmul_nn(a, b.t()), torch.zeros(3, 4, device=DEVICE))


@pytest.mark.large
@pytest.mark.parametrize("kind", ["tma", "pointer"])
def test_results_past_2_to_the_31_elements(kind):
    """The last rows of a result whose offsets do not fit in 32 bits."""
    m, n, k = 16640, 131072, 64
    a, b, _ = operands(m, 1024, k)
    b = b.repeat(n // 1024, 1)
    chosen = {"tma": CANDIDATES[0], "pointer": POINTER[-1]}[kind]
    y = matmul_fwd(a, b, None, "nt", torch.bfloat16, chosen)
    assert y.numel() > 2**31
    assert same_bytes(y[-200:], matmul_fwd(a[-200:], b, None, "nt", torch.bfloat16))
    assert same_bytes(y[:200], matmul_fwd(a[:200], b, None, "nt", torch.bfloat16))


@pytest.mark.large
def test_operands_past_2_to_the_31_elements():
    m, k = 33000, 65536
    a = torch.zeros(m, k, dtype=torch.bfloat16, device=DEVICE)
    last, b, _ = operands(64, 64, k)
    a[-64:] = last
    expected = matmul_nt(last, b)
    assert same_bytes(matmul_nt(a, b)[-64:], expected)
    assert same_bytes(matmul_fwd(a, b, None, "nt", torch.float32, POINTER[-1])[-64:], expected)


@pytest.mark.parametrize("m", [1, 64, 600])
def test_compiled_equals_eager(m):
    a, b, bias = operands(m, 1024, 1024)

    def product(a, b, bias):
        y = matmul_nt(a, b, bias=bias, out_dtype=torch.bfloat16)
        return matmul_nn(y * 2, b, out_dtype=torch.bfloat16)

    compiled = torch.compile(product, fullgraph=True)
    assert same_bytes(compiled(a, b, bias), product(a, b, bias))


@pytest.mark.parametrize("m", [1, 7, 256])
def test_a_captured_graph_equals_eager(m):
    a, b, bias = operands(m, 1024, 3072)
    with numeric_settings():
        expected = matmul_nt(a, b, bias=bias, out_dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = matmul_nt(a, b, bias=bias, out_dtype=torch.bfloat16)
    y.zero_()
    graph.replay()
    assert same_bytes(y, expected)


@pytest.mark.skipif(not torch.cuda.is_available() or not has_tma(DEVICE), reason="needs sm_90")
@pytest.mark.parametrize("schedule", [s for s in DECODE if s.overlap], ids=lambda s: s.name)
def test_overlapping_launches_wait_for_each_other(schedule):
    """A chain of products, each of which reads what the one before it has just written."""
    x, _, _ = operands(16, 1024, 1024)
    generator = torch.Generator(DEVICE).manual_seed(0)
    b = (torch.randn(1024, 1024, device=DEVICE, generator=generator) / 32).bfloat16()

    def chain(x, schedule):
        for _ in range(20):
            x = matmul_fwd(x, b, None, "nt", torch.bfloat16, schedule)
        return x

    expected = chain(x, replace(schedule, overlap=False))
    for _ in range(5):
        assert same_bytes(chain(x, schedule), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x, schedule)
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert same_bytes(y, expected)


def test_the_registered_op_says_shapes_without_data():
    a, b, bias = operands(8, 64, 128)
    torch.library.opcheck(
        torch.ops.rl_consistency.matmul_op.default, (a, b, bias, "nt", torch.float32)
    )
    torch.library.opcheck(
        torch.ops.rl_consistency.matmul_op.default,
        (a, b.t().contiguous(), None, "nn", torch.bfloat16),
    )


def test_a_descriptor_schedule_refuses_what_it_cannot_describe():
    a, b, _ = operands(8, 64, 99)
    with pytest.raises(ValueError, match="16-byte rows; got strides .*Use a pointer schedule"):
        matmul_fwd(a, b, None, "nt", torch.float32, CANDIDATES[0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [2, 16, 100, 700, 4096])
def test_a_certified_library_gives_the_same_bytes(monkeypatch, dtype, m):
    monkeypatch.setattr(cublaslt, "prefers_library", lambda *a: True)
    monkeypatch.setattr(audit, "AUDIT_EVERY", 1)
    a, b, bias = operands(m, 1024, 1024, dtype)
    admitted = 0
    with numeric_settings():
        for layout, right in (("nt", b), ("nn", b.t().contiguous())):
            for out_dtype in {torch.float32, dtype}:
                y = cublaslt.product(a, right, None, layout, out_dtype)
                if y is not None:
                    admitted += 1
                    assert same_bytes(y, matmul_fwd(a, right, None, layout, out_dtype))
        y = cublaslt.product(a, b, bias, "nt", dtype)
        if y is not None:
            assert same_bytes(y, matmul_fwd(a, b, bias, "nt", dtype))
    assert admitted > 0
    assert audit.schedule_audit().differing == 0


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_a_certified_gradient_from_zero_gives_the_bytes_of_the_order(monkeypatch, tokens):
    monkeypatch.setattr(audit, "AUDIT_EVERY", 1)
    dy, x, _ = operands(tokens, tokens, 1024)
    dy = dy[:, :768].contiguous()
    out = torch.full((768, 1024), float("nan"), device=DEVICE)
    with numeric_settings():
        assert cublaslt.outer_from_zero(dy, x, out)
    assert same_bytes(out, cublaslt.canonical_outer(dy, x))
    report = audit.schedule_audit()
    assert (report.audited, report.differing) == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 128])
def test_underflowed_products_leave_the_same_zero_in_every_schedule(dtype, k):
    """A tile of K may end in steps of zeros, which would turn -0 into +0."""
    tiny = 2.0**-24 if dtype == torch.float16 else 2.0**-100
    a = torch.full((32, k), -tiny, dtype=dtype, device=DEVICE)
    b = torch.full((64, k), tiny * 2.0**-60 if dtype != torch.float16 else tiny, device=DEVICE)
    b = b.to(dtype)
    expected = matmul_fwd(a, b, None, "nt", torch.float32, schedules(dtype, torch.float32)[-1])
    for schedule in schedules(dtype, torch.float32):
        y = matmul_fwd(a, b, None, "nt", torch.float32, schedule)
        assert same_bytes(y, expected), schedule.name
    with numeric_settings():
        assert same_bytes(torch.mm(a, b.t()), expected.to(dtype))


def test_default_cublas_fails_the_same_check():
    """Measured: the library splits K for few rows, and differs from itself for many."""
    a, b, _ = operands(300, 4096, 12288)
    torch.backends.cuda.preferred_blas_library("default")
    assert differing_calls(lambda rows: torch.mm(rows, b.t()), a) > 0
    assert not same_bytes(torch.mm(a[:16], b.t()), matmul_nt(a[:16], b, out_dtype=a.dtype))


def test_a_split_k_fails_the_same_checks(monkeypatch):
    a, b, _ = operands(300, 1024, 4096)

    def split(rows):
        if rows.shape[0] > 16:
            return matmul_nt(rows, b)
        return matmul_nt(rows[:, :2000], b[:, :2000]) + matmul_nt(rows[:, 2000:], b[:, 2000:])

    assert differing_calls(split, a) > 0

    def library(a, b, bias, layout, out_dtype):
        return matmul_nt(a[:, :2000], b[:, :2000]) + matmul_nt(a[:, 2000:], b[:, 2000:])

    key = Key.of("nt", a.dtype, torch.float32, False, 100, 1024, 4096)
    monkeypatch.setattr(cublaslt, "library_product", library)
    assert cublaslt.compare(DEVICE, key, 100) > 0
