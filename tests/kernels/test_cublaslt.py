import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels import cublaslt
from rl_consistency.kernels.cublaslt import (
    Certificates,
    Key,
    compare,
    differing_elements,
    library_product,
    schedule_audit,
)
from rl_consistency.parity.digest import first_difference

IDENTITY = {"device": "one", "torch": "1"}
KEY = Key.of("nt", torch.bfloat16, torch.bfloat16, False, 100, 64, 96)
CPU = torch.device("cpu")


class Comparison:
    """Counts its calls and answers what it is told."""

    def __init__(self, differing=0):
        self.differing = differing
        self.calls = []

    def __call__(self, key, m):
        self.calls.append((key, m))
        return self.differing


def certificates(tmp_path, comparison, identity=IDENTITY):
    return Certificates(tmp_path / "deep" / "file.json", identity, comparison)


@pytest.fixture
def audit(monkeypatch):
    monkeypatch.setattr(cublaslt, "_audit", cublaslt._Audit())
    monkeypatch.setattr(cublaslt, "_by_device", {})
    return cublaslt._audit


def test_a_key_covers_a_range_of_rows_to_a_power_of_two():
    def key(m):
        return Key.of("nn", torch.bfloat16, torch.float32, True, m, 8, 16)

    assert key(65) == key(100) == key(128) != key(129)
    assert key(100).name == "nn/bf16/fp32/bias/n8/k16/m128"
    assert key(100).sample(100) == [65, 96, 100, 128]
    assert key(2).sample(2) == [2]
    outer = Key.of("tn", torch.bfloat16, torch.float32, False, 100, 8, 16)
    assert outer.sample(112) == [96, 112, 128]


def test_equal_products_are_certified_once_and_kept(tmp_path):
    comparison = Comparison()
    first = certificates(tmp_path, comparison)
    assert first.admitted(KEY, 100)
    assert [m for _, m in comparison.calls] == [65, 96, 100, 128]
    assert first.admitted(KEY, 77)
    assert certificates(tmp_path, Comparison(5)).admitted(KEY, 100)
    assert len(comparison.calls) == 4


def test_a_differing_product_gets_no_certificate(tmp_path):
    assert not certificates(tmp_path, Comparison(1)).admitted(KEY, 100)
    assert not certificates(tmp_path, Comparison(0)).admitted(KEY, 100)


def test_nothing_is_compared_during_capture_and_only_compared_counts_are_admitted(tmp_path):
    comparison = Comparison()
    held = certificates(tmp_path, comparison)
    assert not held.admitted(KEY, 100, make=False)
    assert comparison.calls == []
    held.admitted(KEY, 100)
    assert held.admitted(KEY, 100, make=False)
    assert not held.admitted(KEY, 99, make=False)


def test_what_will_be_captured_can_be_certified_to_the_row(tmp_path):
    comparison = Comparison()
    held = certificates(tmp_path, comparison)
    held.admitted(KEY, 100)
    assert held.admitted(KEY, 99, to_the_row=True)
    assert [m for _, m in comparison.calls] == [65, 96, 100, 128, 99]
    assert held.admitted(KEY, 99, make=False) and not held.admitted(KEY, 98, make=False)
    assert not held.admitted(KEY, 98, make=False, to_the_row=True)
    assert certificates(tmp_path, comparison).admitted(KEY, 99, to_the_row=True)
    assert len(comparison.calls) == 5
    bad = certificates(tmp_path, Comparison(1))
    assert bad.admitted(KEY, 98) and not bad.admitted(KEY, 98, to_the_row=True)
    assert not bad.admitted(KEY, 100)


def test_only_what_runs_in_the_block_is_certified_to_the_row():
    assert not cublaslt._to_the_row.get()
    with pytest.raises(KeyError), cublaslt.certified_to_the_row():
        assert cublaslt._to_the_row.get()
        raise KeyError
    assert not cublaslt._to_the_row.get()


def test_a_struck_certificate_stays_struck_in_the_file(tmp_path):
    other = certificates(tmp_path, Comparison())
    held = certificates(tmp_path, Comparison())
    assert held.admitted(KEY, 100) and other.admitted(KEY, 100)
    held.strike(KEY, "an audit")
    assert not held.admitted(KEY, 100)
    other.admitted(Key.of("nn", torch.float16, torch.float16, False, 4, 8, 8), 4)
    fresh = certificates(tmp_path, Comparison())
    assert not fresh.admitted(KEY, 100)
    content = json.loads((tmp_path / "deep" / "file.json").read_text())
    assert content["findings"][KEY.name]["struck"] == "an audit"
    assert len(content["findings"]) == 2


def test_findings_of_two_processes_are_merged_and_a_bad_one_stays(tmp_path):
    good, bad = certificates(tmp_path, Comparison()), certificates(tmp_path, Comparison(4))
    assert good.admitted(KEY, 100)
    assert not bad.admitted(KEY, 77)

    def found():
        content = json.loads((tmp_path / "deep" / "file.json").read_text())
        return content["findings"][KEY.name]

    merged = {"differing": 4 * 4, "rows": [65, 77, 96, 100, 128], "struck": ""}
    assert found() == merged
    # The good finding is written last, and gives way as well.
    good.admitted(Key.of("nn", torch.float16, torch.float16, False, 4, 8, 8), 4)
    assert found() == merged
    assert not good.admitted(KEY, 100)
    assert not certificates(tmp_path, Comparison()).admitted(KEY, 100)


@pytest.fixture
def environment(monkeypatch, tmp_path, audit):
    """Opens the certificates of a device as a new process would, where variables are set."""
    gpu = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cublaslt, "compare", lambda *a: 0)
    monkeypatch.setenv(cublaslt.CACHE_VARIABLE, str(tmp_path))
    for name in cublaslt.LIBRARY_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def opened(**variables):
        cublaslt._by_device.clear()
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return cublaslt.certificates(CPU)

    return opened


def test_another_identity_neither_wipes_nor_sees_what_was_struck(environment, tmp_path):
    held = environment()
    assert held.admitted(KEY, 100)
    held.strike(KEY, "an audit")
    other = environment(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert not other.knows(KEY)
    assert other.admitted(KEY, 100)
    assert environment().knows(KEY) and not environment().admitted(KEY, 100)
    assert environment(CUBLAS_WORKSPACE_CONFIG=":4096:8").admitted(KEY, 100)
    names = sorted(path.name for path in tmp_path.glob("*.json"))
    assert len(names) == 2
    assert all(name.startswith("matmul_certificates_A_GPU_") for name in names)


@pytest.mark.parametrize("change", [{"device": "two"}, {"torch": "2"}, {"more": "x"}])
def test_a_file_from_another_device_or_version_is_made_anew(tmp_path, change):
    certificates(tmp_path, Comparison()).admitted(KEY, 100)
    comparison = Comparison(3)
    assert not certificates(tmp_path, comparison, IDENTITY | change).admitted(KEY, 100)
    assert comparison.calls


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"findings": {}}', '{"identity": %s, "findings": {"a": {"x": 1}}}']
)
def test_a_damaged_file_is_made_anew_with_a_warning(tmp_path, text):
    path = tmp_path / "deep" / "file.json"
    path.parent.mkdir()
    path.write_text(text.replace("%s", json.dumps(IDENTITY)))
    comparison = Comparison()
    with pytest.warns(UserWarning, match=r"file\.json is damaged or unreadable .* made anew"):
        held = certificates(tmp_path, comparison)
        assert held.admitted(KEY, 100)
    assert comparison.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert certificates(tmp_path, Comparison(5)).admitted(KEY, 100)


def test_an_unwritable_directory_warns_and_lasts_for_the_process(tmp_path):
    (tmp_path / "deep").write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="RL_CONSISTENCY_CACHE"):
        held = Certificates(tmp_path / "deep" / "file.json", IDENTITY, Comparison())
        assert held.admitted(KEY, 100)


def test_the_cache_directory_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_CONSISTENCY_CACHE", str(tmp_path))
    assert cublaslt.cache_directory() == tmp_path
    monkeypatch.delenv("RL_CONSISTENCY_CACHE")
    assert cublaslt.cache_directory().parts[-2:] == (".cache", "rl_consistency")


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
    key = Key.of("tn", torch.bfloat16, torch.float32, False, 64, 16, 24)

    def backwards(dy, x, out):
        out.copy_(cublaslt.canonical_outer(dy.flip(0), x.flip(0)))

    def canonical(dy, x, out):
        out.copy_(cublaslt.canonical_outer(dy, x))

    assert compare(CPU, key, 64, outer=canonical) == 0
    assert compare(CPU, key, 64, outer=backwards) > 0


@pytest.fixture
def on_this_machine(monkeypatch, tmp_path, audit):
    """The library path on CPU tensors, in front of it the interpreter as the canonical order."""
    # The CPU's memory starts on 64 bytes, a GPU's on 256.
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 64)
    monkeypatch.setattr(cublaslt, "settings_in_force", lambda: True)
    monkeypatch.setattr(cublaslt, "prefers_library", lambda *a: True)
    monkeypatch.setattr(cublaslt, "AUDIT_EVERY", 3)
    monkeypatch.setattr(cublaslt, "_has_room", lambda *a: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "library_product", cublaslt.matmul_fwd)
    held = certificates(tmp_path, Comparison())
    cublaslt._by_device[CPU] = held
    return held


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_every_third_call_is_audited_and_a_difference_strikes(on_this_machine, monkeypatch):
    a = torch.randn(100, 96).bfloat16()
    b = torch.randn(64, 96).bfloat16()
    for _ in range(7):
        assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is not None
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing, report.found) == (7, 2, 0, 0)
    assert report.struck == []

    def wrong(*operands):
        return cublaslt.matmul_fwd(*operands) * 1.01

    monkeypatch.setattr(cublaslt, "library_product", wrong)
    for _ in range(3):
        cublaslt.product(a, b, None, "nt", torch.bfloat16)
    report = schedule_audit()
    assert report.audited == 3 and report.differing > 0 and report.struck == [KEY.name]
    assert report.found == report.differing
    assert cublaslt.product(a, b, None, "nt", torch.bfloat16) is None
    again = schedule_audit()
    assert (again.differing, again.found) == (report.differing, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_gradients_from_zero_are_audited_too(on_this_machine, monkeypatch):
    dy, x = torch.randn(96, 64).bfloat16(), torch.randn(96, 32).bfloat16()
    out = torch.empty(64, 32)
    monkeypatch.setattr(
        cublaslt, "library_outer", lambda dy, x, out: out.copy_(cublaslt.canonical_outer(dy, x))
    )
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
def test_a_gradient_of_misaligned_or_sliced_operands_stays_with_triton(
    on_this_machine, monkeypatch
):
    dy, x = torch.randn(96, 64).bfloat16(), torch.randn(96, 32).bfloat16()
    out = torch.empty(64, 32)
    monkeypatch.setattr(cublaslt, "library_outer", lambda dy, x, out: out.zero_())
    assert cublaslt.outer_from_zero(dy, x, out)
    assert not cublaslt.outer_from_zero(torch.cat([dy, dy], dim=1)[:, :64], x, out)
    assert not cublaslt.outer_from_zero(dy, x.new_empty(x.numel() + 8)[8:].view_as(x), out)
    assert not cublaslt.outer_from_zero(dy, x, torch.empty(64, 64)[:, :32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_an_audit_that_began_in_inference_mode_goes_on_in_training(on_this_machine, monkeypatch):
    monkeypatch.setattr(cublaslt, "AUDIT_EVERY", 1)
    a, b = torch.randn(100, 96).bfloat16(), torch.randn(64, 96).bfloat16()
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
    for other in (turned, sliced, misaligned):
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


def test_without_the_settings_the_library_is_not_used(audit):
    a = torch.randn(1024, 64).bfloat16()
    assert not cublaslt.settings_in_force()
    assert cublaslt.product(a, a, None, "nt", torch.bfloat16) is None
    assert schedule_audit().calls == 0


def test_one_row_never_goes_to_the_library():
    for layout in ("nt", "nn"):
        assert not cublaslt.prefers_library(1, 4096, 4096, torch.bfloat16, layout)


def test_the_library_product_is_the_product():
    a, b, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    torch.testing.assert_close(library_product(a, b, bias, "nt", torch.float32), a @ b.t() + bias)
    torch.testing.assert_close(library_product(a, b.t(), None, "nn", torch.float32), a @ b.t())


def test_strikes_of_many_writers_at_once_are_all_kept(tmp_path):
    keys = [replace(KEY, n=8 * (i + 1)) for i in range(24)]

    def strike(key):
        certificates(tmp_path, lambda key, m: 0).strike(key, "differed")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(strike, keys))
    kept = certificates(tmp_path, lambda key, m: 0)
    assert not any(kept.admitted(key, 100) for key in keys)
