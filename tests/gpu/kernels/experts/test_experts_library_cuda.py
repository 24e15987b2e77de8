"""torch's grouped product beside our own on a GPU: equal bytes, by certificates."""

import pytest
import torch

from rl_consistency.kernels.core.device import has_wgmma
from rl_consistency.kernels.core.findings import findings_of
from rl_consistency.kernels.experts import library
from rl_consistency.kernels.experts.library import key_of, takes
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.audit import schedule_audit
from rl_consistency.numerics.settings import numeric_settings
from tests.kernels.experts.cases import GROUPINGS, WHOLE, Block

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def audited_often(fresh_certificates, monkeypatch):
    if not has_wgmma(DEVICE):
        pytest.skip("needs an NVIDIA GPU of sm_90")
    monkeypatch.setattr(audit, "AUDIT_EVERY", 5)
    with numeric_settings():
        yield


@pytest.mark.parametrize(
    ("experts", "n", "k"), [(128, 1536, 2048), (128, 2048, 768), (16, 1000, 520), (8, 4096, 1024)]
)
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_the_library_has_our_bytes(experts, n, k, layout):
    shape = (experts, n, k) if layout == "nt" else (experts, k, n)
    weights = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for pairs in (100, 2048, 16384):
        key = key_of(weights, layout, pairs)
        assert (key.n, key.k) == (n, k)
        assert key.compare(DEVICE, pairs) == 0


def test_a_step_by_the_library_has_the_bytes_of_a_step_without(monkeypatch):
    block = Block(torch.bfloat16, DEVICE)
    expected = block.step(WHOLE)
    calls, own = [], library.library_product

    def noted(a, weights, layout, first):
        calls.append((len(a), layout))
        return own(a, weights, layout, first)

    monkeypatch.setattr(library, "prefers_library", lambda *a: True)
    assert block.step(WHOLE).equals(expected)  # makes certificates, for which the library runs too
    monkeypatch.setattr(library, "library_product", noted)
    assert block.step(WHOLE).equals(expected)
    # gate and up, down; then u and dx.
    assert [layout for _, layout in calls] == ["nt", "nt", "nn", "nn"]
    assert findings_of(DEVICE).certifies(key_of(block.weights[1], "nt", calls[0][0]).name)
    for groups in GROUPINGS:
        assert block.step(groups, gap=1).equals(expected)
    report = schedule_audit()
    assert report.audited > 0 and report.differing == 0


def test_a_capture_takes_only_what_was_compared(monkeypatch):
    monkeypatch.setattr(library, "prefers_library", lambda *a: True)
    weights = torch.zeros(8, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=DEVICE)
    with torch.cuda.graph(graph):
        x.add_(1)
        assert not takes(weights, "nt", 64)
    assert takes(weights, "nt", 64)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert takes(weights, "nt", 64) and not takes(weights, "nt", 63)
