from dataclasses import replace

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, matmul_fwd
from rl_consistency.kernels.matmul.schedules import CANDIDATES, POINTER, POINTER_FP32
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.matmul.test_matmul import (
    test_a_product_without_elements_is_empty_or_the_bias,  # noqa: F401
    test_every_pair_of_dtypes_rounds_one_accumulator_once,  # noqa: F401
    test_neighbours_of_any_value_do_not_matter,  # noqa: F401
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_certificates")]

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def device():
    return DEVICE


def operands(m, n, k, dtype=torch.bfloat16):
    a = probe((m, k), dtype, scale=0.25).to(DEVICE)
    b = probe((n, k), dtype, seed=1, scale=k**-0.5).to(DEVICE)
    return a, b, probe((n,), dtype, seed=2).to(DEVICE)


def schedules(dtype, out_dtype):
    if dtype == torch.float32:
        return POINTER_FP32
    usable = CANDIDATES if has_tma(DEVICE) else POINTER
    return [s.within(SHARED_BYTES, dtype.itemsize, out_dtype.itemsize) for s in usable]


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_schedule_rounds_one_accumulator_once(dtype, out_dtype):
    """Few rows and many, by a schedule of each kind."""
    a, b, bias = operands(300, 392, 104, dtype)
    wide = matmul_nt(a, b, bias=bias)
    for schedule in {s.kind: s for s in schedules(dtype, out_dtype)}.values():
        for rows in (1, 40, 300):
            found = matmul_fwd(a[:rows], b, bias, "nt", out_dtype, schedule)
            assert same_bytes(found, wide[:rows].to(out_dtype)), schedule.name


def test_a_prefix_of_many_rows_keeps_its_bytes():
    a, b, _ = operands(8192, 1024, 1024)
    with numeric_settings():
        whole = matmul_nt(a, b, out_dtype=torch.bfloat16)
        for m in (1, 2, 3, 5, 8, 13, 31, 64, 100, 255, 256, 511, 1000, 2048, 4095, 8191):
            assert same_bytes(matmul_nt(a[:m], b, out_dtype=torch.bfloat16), whole[:m]), m


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


@pytest.mark.skipif(not torch.cuda.is_available() or not has_tma(DEVICE), reason="needs sm_90")
@pytest.mark.parametrize("schedule", [s for s in CANDIDATES if s.overlap], ids=lambda s: s.name)
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
