"""The vendor library as a schedule: taken where certified, audited, and struck where it differs."""

from functools import partial

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.audit import differing_elements, generation, schedule_audit
from rl_consistency.kernels.matmul.certificates import Certificates, Key
from rl_consistency.kernels.matmul.cublaslt import (
    compare,
    library_product,
)
from rl_consistency.parity.digest import first_difference

KEY = Key.of("nt", torch.bfloat16, torch.bfloat16, False, 100, 64, 96)
CPU = torch.device("cpu")


@pytest.fixture
def fresh_audit(monkeypatch):
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    monkeypatch.setattr(cublaslt, "_by_device", {})


def test_only_what_runs_in_the_block_is_certified_to_the_row():
    assert not cublaslt._to_the_row.get()
    with pytest.raises(KeyError), cublaslt.certified_to_the_row():
        assert cublaslt._to_the_row.get()
        raise KeyError
    assert not cublaslt._to_the_row.get()


def test_differing_elements_counts_bytes_and_not_nan():
    a = torch.tensor([1.0, float("nan"), 0.0, 2.0])
    b = torch.tensor([1.0, float("nan"), -0.0, 3.0])
    assert int(differing_elements(a, b)) == 2
    assert int(differing_elements(a.bfloat16(), b.bfloat16())) == 2
    assert first_difference({"": a}, {"": a}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_a_product_in_another_order_differs_on_probe_data(layout):
    """The canonical schedule stands in for the library, then one that splits K."""
    key = Key.of(layout, torch.bfloat16, torch.float32, layout == "nt", 20, 16, 96)

    def canonical(a, b, bias, layout, out_dtype):
        return cublaslt.matmul_fwd(a, b, bias, layout, out_dtype)

    def split(a, b, bias, layout, out_dtype):
        inner = 1 if layout == "nt" else 0
        half = a.shape[1] // 2
        parts = zip(a.split(half, 1), b.split(half, inner), (bias, None), strict=True)
        return sum(cublaslt.matmul_fwd(*part, layout, out_dtype) for part in parts)

    assert compare(CPU, key, 20, library=canonical) == 0
    assert compare(CPU, key, 20, library=split) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_a_gradient_in_another_order_differs_on_probe_data():
    key = Key.of("tn", torch.bfloat16, torch.float32, False, 1024, 16, 24)  # several steps

    def backwards(dy, x, out):
        out.copy_(cublaslt.canonical_outer(dy.flip(0), x.flip(0)))

    def canonical(dy, x, out):
        out.copy_(cublaslt.canonical_outer(dy, x))

    assert compare(CPU, key, 1024, outer=canonical) == 0
    assert compare(CPU, key, 1024, outer=backwards) > 0


def unused():
    """In place of our own schedule, which the race of a test does not run."""
    pytest.fail("computed by our own schedule")


def drawn(*shape):
    return torch.randn(shape).bfloat16()


@pytest.fixture
def on_this_machine(monkeypatch, tmp_path, fresh_audit):
    """The library path on CPU tensors, in front of it the interpreter as the canonical order."""
    # The CPU's memory starts on 64 bytes, a GPU's on 256.
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 64)
    monkeypatch.setattr(cublaslt, "settings_in_force", lambda: True)
    monkeypatch.setattr(cublaslt, "prefers_library", lambda *a: True)
    monkeypatch.setattr(audit, "AUDIT_EVERY", 3)
    monkeypatch.setattr(cublaslt, "_has_room", lambda *a: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "library_product", cublaslt.matmul_fwd)
    monkeypatch.setattr(cublaslt, "tuned_preference", lambda *a: None)
    monkeypatch.setattr(cublaslt, "time_ratio", lambda own, library: 1.2)
    held = Certificates(tmp_path / "file.json", {}, lambda key, m: 0)
    cublaslt._by_device[CPU] = held
    return held


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_every_third_call_is_audited_and_a_difference_strikes(on_this_machine, monkeypatch):
    a = drawn(100, 96)
    b = drawn(64, 96)
    for _ in range(7):
        assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing, report.found) == (7, 2, 0, 0)
    assert report.struck == [] and generation() == 0

    def wrong(*operands):
        return cublaslt.matmul_fwd(*operands) * 1.01

    monkeypatch.setattr(cublaslt, "library_product", wrong)
    for _ in range(3):
        cublaslt.product(a, b, None, "nt", torch.bfloat16)
    report = schedule_audit()
    assert report.audited == 3 and report.differing > 0 and report.struck == [KEY.name]
    assert report.found == report.differing
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is None
    assert generation() == 1 and audit.withdrawn_since(0) == [KEY.name]
    assert audit.withdrawn_since(1) == []
    again = schedule_audit()
    assert (again.differing, again.found) == (report.differing, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_gradients_from_zero_are_audited_too(on_this_machine, monkeypatch):
    dy, x = drawn(96, 64), drawn(96, 32)
    out = torch.empty(64, 32)
    monkeypatch.setattr(
        cublaslt, "library_outer", lambda dy, x, out: out.copy_(cublaslt.canonical_outer(dy, x))
    )
    for _ in range(3):
        assert cublaslt.outer_from_zero(dy, x, out, unused)
    assert schedule_audit().differing == 0
    assert not cublaslt.outer_from_zero(dy[:90], x[:90], out, unused)
    monkeypatch.setattr(cublaslt, "library_outer", lambda dy, x, out: out.fill_(1.0))
    for _ in range(3):
        cublaslt.outer_from_zero(dy, x, out, unused)
    assert schedule_audit().differing > 0
    assert not cublaslt.outer_from_zero(dy, x, out, unused)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_a_gradient_is_given_to_the_faster_of_the_two(on_this_machine, monkeypatch):
    dy, x, out = drawn(96, 64), drawn(96, 32), torch.empty(64, 32)
    raced = []

    def race(own, library):
        raced.append((own, library))
        return 0.7  # of the library's time

    monkeypatch.setattr(cublaslt, "library_outer", lambda dy, x, out: out.fill_(1.0))
    monkeypatch.setattr(cublaslt, "time_ratio", race)
    own = partial(out.fill_, 2.0)
    assert not cublaslt.outer_from_zero(dy, x, out, own)
    assert not cublaslt.outer_from_zero(dy, x, out, own)
    assert len(raced) == 1
    for call, value in zip(raced[0], (2.0, 1.0), strict=True):
        call()
        assert (out == value).all()
    # What `tune` has measured is not measured again.
    monkeypatch.setattr(cublaslt, "tuned_preference", lambda *a: True)
    assert cublaslt.outer_from_zero(dy, x, out, own)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_nothing_is_raced_while_a_graph_is_captured(on_this_machine, monkeypatch):
    dy, x, out = drawn(96, 64), drawn(96, 32), torch.empty(64, 32)
    monkeypatch.setattr(cublaslt, "library_outer", lambda dy, x, out: out.fill_(1.0))
    on_this_machine.admitted(Key.of("tn", torch.bfloat16, torch.float32, False, 96, 64, 32), 96)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cublaslt, "time_ratio", lambda own, library: pytest.fail("raced"))
    assert cublaslt.outer_from_zero(dy, x, out, unused)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_a_gradient_of_misaligned_or_sliced_operands_stays_with_triton(
    on_this_machine, monkeypatch
):
    dy, x = torch.randn(96, 64).bfloat16(), torch.randn(96, 32).bfloat16()
    out = torch.empty(64, 32)
    monkeypatch.setattr(cublaslt, "library_outer", lambda dy, x, out: out.zero_())
    assert cublaslt.outer_from_zero(dy, x, out, unused)
    assert not cublaslt.outer_from_zero(torch.cat([dy, dy], dim=1)[:, :64], x, out, unused)
    assert not cublaslt.outer_from_zero(dy, x.new_empty(x.numel() + 8)[8:].view_as(x), out, unused)
    assert not cublaslt.outer_from_zero(dy, x, torch.empty(64, 64)[:, :32], unused)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_no_certificate_is_made_during_capture_or_without_memory(on_this_machine, monkeypatch):
    a, b = torch.randn(100, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    for name, value in (("is_current_stream_capturing", True), ("_has_room", False)):
        owner = torch.cuda if name.startswith("is") else cublaslt
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *a, value=value: value)
            assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is None
            assert not on_this_machine.knows(KEY)
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    assert cublaslt.product(a[:99], b, None, "nt", torch.bfloat16) is None


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


def test_one_row_never_goes_to_the_library():
    for layout in ("nt", "nn"):
        assert not cublaslt.prefers_library(1, 4096, 4096, torch.bfloat16, layout)


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
