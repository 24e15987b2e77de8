import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.experts.route import (
    choose_fwd,
    route,
)
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS, HIDDEN, TOP_K = 320, 1024, 8


def operands(dtype=torch.bfloat16, experts=128):
    x = probe((ROWS, HIDDEN), dtype, scale=0.02).to(DEVICE)
    return x, probe((experts, HIDDEN), dtype, seed=1, scale=HIDDEN**-0.5).to(DEVICE)


def routed(rows, weight, normalize=True):
    ids, weights = route(rows, weight, TOP_K, normalize=normalize)
    return torch.cat([ids.float(), weights], dim=1)


def test_logits_are_those_of_matmul_and_are_not_rounded():
    x, weight = operands()
    ids, weights, _ = choose_fwd(matmul_nt(x, weight), TOP_K, True)
    ours = route(x, weight, TOP_K, normalize=True)
    assert same_bytes(ours[0], ids) and same_bytes(ours[1], weights)
    rounded = matmul_nt(x, weight, out_dtype=torch.bfloat16).float()
    assert not torch.equal(choose_fwd(rounded, TOP_K, True)[0], ids)


def test_a_logit_that_is_not_finite_fails_its_row_alone():
    logits = probe((6, 128)).to(DEVICE)
    _, expected, _ = choose_fwd(logits, TOP_K, True)
    for row, value in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        logits[row, 5] = value
    logits[5] = torch.nan
    ids, weights, _ = choose_fwd(logits, TOP_K, True)
    assert weights[[1, 3, 4, 5]].isnan().all()
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert int(ids.min()) >= 0 and int(ids.max()) < 128
    assert same_bytes(weights[[0, 2]], expected[[0, 2]])


def test_a_captured_graph_equals_eager():
    x, weight = operands()
    given = x[:9].clone()
    with torch.no_grad():
        route(given, weight, TOP_K, normalize=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = route(given, weight, TOP_K, normalize=True)
        for start in (0, 40, 100):
            given.copy_(x[start : start + 9])
            graph.replay()
            expected = route(x[start : start + 9], weight, TOP_K, normalize=True)
            assert all(map(same_bytes, results, expected))
