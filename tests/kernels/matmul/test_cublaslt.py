"""The vendor library as a schedule: taken where certified, audited, withdrawn where it differs."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import findings_of
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.audit import differing_elements, schedule_audit, withdrawals
from rl_consistency.kernels.matmul.cublaslt import (
    Key,
    certified,
    certified_to_the_row,
    compare,
    library_product,
)
from tests.comparison import first_difference

KEY = Key.of("nt", torch.bfloat16, torch.bfloat16, False, 100, 64, 96)
CPU = torch.device("cpu")


@pytest.fixture
def fresh_audit(monkeypatch):
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    monkeypatch.setattr(findings_module, "_by_device", {})


class Comparison:
    """Counts its calls and answers what it is told; stands in for the device too."""

    def __init__(self, monkeypatch):
        self.differing, self.calls = 0, []
        self.capturing, self.room = False, True
        monkeypatch.setattr(cublaslt, "compare", self.compare)
        monkeypatch.setattr(cublaslt, "_has_room", lambda device, key: self.room)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def compare(self, device, key, m):
        self.calls.append(m)
        return self.differing


@pytest.fixture
def comparison(monkeypatch, fresh_audit):
    return Comparison(monkeypatch)


def test_a_key_covers_a_range_of_rows_to_a_power_of_two():
    def key(m):
        return Key.of("nn", torch.bfloat16, torch.float32, True, m, 8, 16)

    assert key(65) == key(100) == key(128) != key(129)
    assert key(100).name == "nn/bf16/fp32/bias/n8/k16/m128"
    assert key(100).sample(100) == [65, 96, 100, 128]
    assert key(2).sample(2) == [2]
    outer = Key.of("tn", torch.bfloat16, torch.float32, False, 100, 8, 16)
    assert outer.sample(112) == [96, 112, 128]


def test_a_certificate_is_made_once_and_one_that_differs_admits_nothing(comparison):
    assert certified(CPU, KEY, 100) and certified(CPU, KEY, 77)
    assert comparison.calls == [65, 96, 100, 128] == findings_of(CPU).certificate(KEY.name).rows
    comparison.differing = 1
    other = Key.of("nn", torch.bfloat16, torch.bfloat16, False, 100, 64, 96)
    assert not certified(CPU, other, 100)
    comparison.differing = 0
    assert not certified(CPU, other, 100) and len(comparison.calls) == 8


def test_what_will_be_captured_can_be_certified_to_the_row(comparison):
    comparison.capturing = True
    assert not certified(CPU, KEY, 100) and comparison.calls == []
    comparison.capturing = False
    certified(CPU, KEY, 100)
    with certified_to_the_row():
        assert certified(CPU, KEY, 99)
        comparison.capturing = True
        assert not certified(CPU, KEY, 98)
    assert comparison.calls == [65, 96, 100, 128, 99]
    assert certified(CPU, KEY, 99) and not certified(CPU, KEY, 98)
    comparison.capturing, comparison.differing = False, 1
    with certified_to_the_row():
        assert not certified(CPU, KEY, 98) and not certified(CPU, KEY, 100)
    assert not certified(CPU, KEY, 100)


def test_no_certificate_is_made_without_memory_or_of_what_was_withdrawn(comparison, monkeypatch):
    comparison.room = False
    assert not certified(CPU, KEY, 100)
    comparison.room = True
    with monkeypatch.context() as patch:
        held = findings_module._Content(withdrawn={KEY.name: "slower"})
        patch.setattr(findings_module, "shipped", lambda: held)
        assert not certified(CPU, KEY, 100)
    assert comparison.calls == [] and certified(CPU, KEY, 100)
    findings_of(CPU).withdraw(KEY.name, "an audit")
    with certified_to_the_row():
        assert not certified(CPU, KEY, 99)
    assert len(comparison.calls) == 4


def test_differing_elements_counts_bytes_and_not_nan():
    a = torch.tensor([1.0, float("nan"), 0.0, 2.0])
    b = torch.tensor([1.0, float("nan"), -0.0, 3.0])
    assert int(differing_elements(a, b)) == 2
    assert int(differing_elements(a.bfloat16(), b.bfloat16())) == 2
    assert first_difference({"": a}, {"": a}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_a_product_in_another_order_differs_on_probe_data(layout, monkeypatch):
    """The canonical schedule stands in for the library, then one that splits K."""
    key = Key.of(layout, torch.bfloat16, torch.float32, layout == "nt", 20, 16, 96)

    def split(a, b, bias, layout, out_dtype):
        inner = 1 if layout == "nt" else 0
        half = a.shape[1] // 2
        parts = zip(a.split(half, 1), b.split(half, inner), (bias, None), strict=True)
        return sum(cublaslt.matmul_fwd(*part, layout, out_dtype) for part in parts)

    for library, differs in ((cublaslt.matmul_fwd, False), (split, True)):
        monkeypatch.setattr(cublaslt, "library_product", library)
        assert (compare(CPU, key, 20) > 0) == differs


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_a_gradient_in_another_order_differs_on_probe_data(monkeypatch):
    key = Key.of("tn", torch.bfloat16, torch.float32, False, 1024, 16, 24)  # several steps

    def backwards(dy, x, out):
        return cublaslt.canonical_outer(dy.flip(0), x.flip(0))

    for outer, differs in ((canonical, False), (backwards, True)):
        monkeypatch.setattr(cublaslt, "library_outer", outer)
        assert (compare(CPU, key, 1024) > 0) == differs


def canonical(dy, x, out):
    return out.copy_(cublaslt.canonical_outer(dy, x))


def drawn(*shape):
    return torch.randn(shape).bfloat16()


@pytest.fixture
def on_this_machine(monkeypatch, comparison):
    """The library path on CPU tensors, in front of it the interpreter as the canonical order."""
    # The CPU's memory starts on 64 bytes, a GPU's on 256.
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 64)
    monkeypatch.setattr(cublaslt, "settings_in_force", lambda: True)
    monkeypatch.setattr(cublaslt, "prefers_library", lambda *a: True)
    monkeypatch.setattr(audit, "AUDIT_EVERY", 3)
    monkeypatch.setattr(cublaslt, "library_product", cublaslt.matmul_fwd)
    monkeypatch.setattr(cublaslt, "library_outer", canonical)
    return comparison


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_every_third_call_is_audited_and_a_difference_withdraws(on_this_machine, monkeypatch):
    a = drawn(100, 96)
    b = drawn(64, 96)
    for _ in range(7):
        assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing, report.found) == (7, 2, 0, 0)
    assert report.withdrawn == [] and withdrawals() == 0

    def wrong(*operands):
        return cublaslt.matmul_fwd(*operands) * 1.01

    monkeypatch.setattr(cublaslt, "library_product", wrong)
    for _ in range(3):
        cublaslt.product(a, b, None, "nt", torch.bfloat16)
    report = schedule_audit()
    assert report.audited == 3 and report.differing > 0 and report.withdrawn == [KEY.name]
    assert report.found == report.differing
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is None
    assert findings_of(CPU).withdrawn.keys() == {KEY.name}
    assert withdrawals() == 1 and audit.withdrawn_since(0) == [KEY.name]
    assert audit.withdrawn_since(1) == []
    again = schedule_audit()
    assert (again.differing, again.found) == (report.differing, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_gradients_from_zero_are_audited_too(on_this_machine, monkeypatch):
    dy, x, out = drawn(96, 64), drawn(96, 32), torch.empty(64, 32)
    for _ in range(3):
        assert cublaslt.outer_from_zero(dy, x, out)
    assert schedule_audit().differing == 0
    assert not cublaslt.outer_from_zero(dy[:90], x[:90], out)
    monkeypatch.setattr(cublaslt, "library_outer", lambda dy, x, out: out.fill_(1.0))
    for _ in range(3):
        cublaslt.outer_from_zero(dy, x, out)
    assert schedule_audit().differing > 0
    assert not cublaslt.outer_from_zero(dy, x, out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_a_gradient_of_misaligned_or_sliced_operands_stays_with_triton(on_this_machine):
    dy, x, out = drawn(96, 64), drawn(96, 32), torch.empty(64, 32)
    assert cublaslt.outer_from_zero(dy, x, out)
    assert not cublaslt.outer_from_zero(torch.cat([dy, dy], dim=1)[:, :64], x, out)
    assert not cublaslt.outer_from_zero(dy, x.new_empty(x.numel() + 8)[8:].view_as(x), out)
    assert not cublaslt.outer_from_zero(dy, x, torch.empty(64, 64)[:, :32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_an_audit_that_began_in_inference_mode_goes_on_in_training(on_this_machine, monkeypatch):
    monkeypatch.setattr(audit, "AUDIT_EVERY", 1)
    a, b = drawn(100, 96), drawn(64, 96)
    with torch.inference_mode():
        assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    with torch.inference_mode():
        assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing) == (3, 3, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_operands_the_library_was_not_certified_for_stay_with_triton(on_this_machine):
    a, b = torch.randn(100, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    turned = a.t().contiguous().t()
    sliced = torch.cat([a, a], dim=1)[:, :96]
    misaligned = a.new_empty(a.numel() + 8)[8:].view_as(a).copy_(a)
    held_elsewhere = TwoTensor(a, a)
    for other in (turned, sliced, misaligned, held_elsewhere):
        assert torch.equal(other, a)
        assert cublaslt.product(other, b, None, "nt", torch.bfloat16) is None
        assert cublaslt.product(b, other, None, "nt", torch.bfloat16) is None
    assert cublaslt.product(b, a, None, "nt", torch.bfloat16) is not None
    assert cublaslt.product(a, b, None, "nt", torch.float16) is None
    bias = torch.randn(64).bfloat16()
    assert cublaslt.product(a, b, bias, "nt", torch.float32) is None
    strided = torch.stack([bias, bias], dim=1)[:, 0]
    assert cublaslt.product(a, b, strided, "nt", torch.bfloat16) is None
    assert cublaslt.product(a, b, bias, "nt", torch.bfloat16) is not None


def test_without_the_settings_the_library_is_not_used(fresh_audit):
    a = torch.randn(1024, 64).bfloat16()
    assert not cublaslt.settings_in_force()
    assert cublaslt.product(a, a, None, "nt", torch.bfloat16) is None
    assert schedule_audit().calls == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_get_cublas_allow_bf16_reduced_precision_reduction", (bool, bool)),
        ("_get_cublas_allow_fp16_reduced_precision_reduction", (bool, bool)),
        ("_get_cublas_allow_fp16_accumulation", bool),
        ("_get_cublas_allow_tf32", bool),
    ],
)
def test_torch_answers_for_a_setting_in_the_form_that_is_read(name, kind):
    value = getattr(torch._C, name)()
    assert type(value) is kind if kind is bool else tuple(map(type, value)) == kind


def test_every_setting_is_asked_for(monkeypatch):
    c = torch._C
    off = {name: (False, False) for name in ("bf16", "fp16")}
    reads = {f"_get_cublas_allow_{k}_reduced_precision_reduction": v for k, v in off.items()}
    reads |= {"_get_cublas_allow_fp16_accumulation": False, "_get_cublas_allow_tf32": False}
    reads["_get_blas_preferred_backend"] = c._BlasBackend.Cublaslt
    for name, value in reads.items():
        monkeypatch.setattr(c, name, lambda value=value: value)
    assert cublaslt.settings_in_force()
    for name, value in reads.items():
        if isinstance(value, tuple):
            others = [(True, False), (False, True)]
        else:
            others = [True if value is False else c._BlasBackend.Cublas]
        for other in others:
            with monkeypatch.context() as one:
                one.setattr(c, name, lambda other=other: other)
                assert not cublaslt.settings_in_force(), (name, other)


def test_the_library_product_is_the_product():
    a, b, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    torch.testing.assert_close(library_product(a, b, bias, "nt", torch.float32), a @ b.t() + bias)
    torch.testing.assert_close(library_product(a, b.t(), None, "nn", torch.float32), a @ b.t())


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_successive_audits_sample_few_rows_each_and_all_rows_together(count, monkeypatch):
    seen = set()
    for audited in range(-(-count // audit.AUDIT_ROWS)):
        monkeypatch.setattr(audit._counts, "audited", audited)
        rows = audit.sampled_rows(count, torch.device("cpu")).tolist()
        assert 1 <= len(rows) <= audit.AUDIT_ROWS and not seen & set(rows)
        seen |= set(rows)
    assert seen == set(range(count))
