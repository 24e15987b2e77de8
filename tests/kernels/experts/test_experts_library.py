"""torch's grouped product as a schedule: where certified, audited, withdrawn if it differs."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import findings_of
from rl_consistency.kernels.experts import cuda, library
from rl_consistency.kernels.experts.library import (
    grouped_product,
    key_of,
    library_product,
    takes,
)
from rl_consistency.kernels.experts.products_triton import product_fwd
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.audit import schedule_audit
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within
from tests.kernels.experts.cases import everything, parameters

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

CPU = torch.device("cpu")
EXPERTS, HIDDEN, WIDTH, PAIRS = 4, 32, 24, 90


def own(a, weights, layout, first):
    """The canonical schedule in the library's place."""
    return product_fwd(a, weights, layout, first, first.new_empty(len(a)), 1, False)


def split(a, weights, layout, first):
    """In two halves of K."""
    inner = 2 if layout == "nt" else 1
    halves = zip(a.split(16, 1), weights.split(16, inner), strict=True)
    return sum(own(x, w.contiguous(), layout, first) for x, w in halves)


@pytest.fixture
def on_this_machine(monkeypatch):
    """The library path on CPU tensors, in front of it the interpreter as the canonical order."""
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    monkeypatch.setattr(audit, "AUDIT_EVERY", 3)
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 64)
    for name in ("has_wgmma", "settings_in_force", "prefers_library"):
        monkeypatch.setattr(library, name, lambda *a: True)
    monkeypatch.setattr(cublaslt, "_has_room", lambda *a: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(library, "library_product", own)
    monkeypatch.setattr(findings_module, "_by_device", {})


def weights_and_first(layout="nt"):
    shape = (EXPERTS, WIDTH, HIDDEN) if layout == "nt" else (EXPERTS, HIDDEN, WIDTH)
    first = torch.tensor([0, 40, 40, 77, 80], dtype=torch.int32)
    return probe(shape, torch.bfloat16, 1, scale=0.2), first


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_the_library_gives_the_product_of_each_pair_with_its_expert(layout):
    weights, first = weights_and_first(layout)
    a = probe((PAIRS, HIDDEN), torch.bfloat16, scale=0.2)
    found = library_product(a, weights, layout, first)[:80]
    expected = own(a, weights, layout, first)[:80]
    assert_within(found, expected, "reduction", torch.bfloat16)


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_a_product_in_another_order_differs_on_probe_data(layout, monkeypatch):
    weights, _ = weights_and_first(layout)
    key = key_of(weights, layout, PAIRS)
    assert (key.n, key.k, key.rows) == (WIDTH, HIDDEN, 128)

    for product, differs in ((own, False), (split, True)):
        monkeypatch.setattr(library, "library_product", product)
        assert (key.compare(CPU, PAIRS) > 0) == differs


def test_split_k_chosen_by_the_tokens_of_an_expert_is_never_admitted(on_this_machine, monkeypatch):
    """Mutant: few rows of an expert are summed in two halves."""
    weights, first = weights_and_first()
    key = key_of(weights, "nt", PAIRS)

    def by_tokens(a, weights, layout, first):
        y, parted = own(a, weights, layout, first), split(a, weights, layout, first)
        few = first.diff() < 8
        expert = torch.searchsorted(first[1:].long(), torch.arange(len(a)), right=True)
        return torch.where(few[expert.clamp(max=EXPERTS - 1)][:, None], parted, y)

    monkeypatch.setattr(library, "library_product", by_tokens)
    assert not takes(weights, "nt", PAIRS)
    assert findings_of(CPU).certificate(key.name).differing > 0
    assert len(first) == EXPERTS + 1


def test_a_certificate_is_made_once_and_names_the_experts(on_this_machine, monkeypatch):
    weights, _ = weights_and_first()
    assert takes(weights, "nt", PAIRS)
    assert findings_of(CPU).certifies("grouped-nt-e4/bf16/bf16/plain/n24/k32/m128")
    monkeypatch.setattr(library.GroupedKey, "compare", lambda *a: pytest.fail("again"))
    assert takes(weights, "nt", PAIRS + 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert takes(weights, "nt", PAIRS) and not takes(weights, "nt", PAIRS + 3)
    assert not takes(weights, "nn", PAIRS)


def test_what_was_not_certified_stays_with_our_own(on_this_machine, monkeypatch):
    weights, _ = weights_and_first()
    assert takes(weights, "nt", PAIRS)
    assert not takes(weights.transpose(1, 2), "nn", PAIRS)
    assert not takes(weights[..., 1:], "nt", PAIRS)
    assert not takes(weights[:, 1:].contiguous()[..., :-1].contiguous(), "nt", PAIRS)
    for name in ("has_wgmma", "settings_in_force", "prefers_library"):
        with monkeypatch.context() as context:
            context.setattr(library, name, lambda *a: False)
            assert not takes(weights, "nt", PAIRS)
    monkeypatch.setattr(cublaslt, "_has_room", lambda *a: False)
    assert takes(weights, "nt", PAIRS) and not takes(weights, "nt", 16 * PAIRS)


def test_every_third_call_is_audited_and_a_difference_withdraws(on_this_machine, monkeypatch):
    weights, first = weights_and_first()
    a = probe((PAIRS, HIDDEN), torch.bfloat16)
    assert takes(weights, "nt", PAIRS)
    for _ in range(7):
        grouped_product(a, weights, "nt", first)
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing) == (7, 2, 0)

    def wrong(*operands):
        return own(*operands) * 1.01

    monkeypatch.setattr(library, "library_product", wrong)
    for _ in range(3):
        grouped_product(a, weights, "nt", first)
    report = schedule_audit()
    assert report.found > 0 and report.withdrawn == [key_of(weights, "nt", PAIRS).name]
    assert not takes(weights, "nt", PAIRS)


@pytest.mark.thorough
def test_the_op_gives_the_same_bytes_by_the_library(on_this_machine, monkeypatch):
    router, gate_up, down = (
        w.detach() for w in parameters(torch.bfloat16, experts=8, hidden=64, width=48)
    )
    x, dy = (probe((70, 64), torch.bfloat16, i, scale=0.1) for i in range(2))
    ids, weights, _ = route_with_logits(x, router, 3, normalize=True)
    layout = PackedSequences.of([3, 40], [33, 20])

    def results():
        return everything(cuda, x, ids, weights, gate_up, down, dy, layout)

    by_library = results()
    assert audit._counts.calls == 4
    monkeypatch.setattr(library, "takes", lambda *a: False)
    assert all(map(same_bytes, by_library, results()))
    assert audit._counts.calls == 4
