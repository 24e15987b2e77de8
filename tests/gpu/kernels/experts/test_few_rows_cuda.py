"""Bytes of the experts of few rows on a GPU: against `linear` of each expert, and in graphs."""

import functools

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts import cuda
from rl_consistency.kernels.experts.few_rows_triton import few_rows_fwd
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.schedules import FEW, MOST_FEW
from rl_consistency.kernels.glu.op import glu
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.router.op import route
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.experts.cases import parameters

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
EXPERTS = 16


@pytest.fixture(autouse=True)
def settings():
    with numeric_settings():
        yield


def operands(rows, hidden, width, top_k, dtype=torch.bfloat16):
    """x, ids, weights, gate_up, down and the router's weight."""
    sizes = {"experts": EXPERTS, "hidden": hidden, "width": width}
    router, gate_up, down = (w.detach() for w in parameters(dtype, DEVICE, **sizes))
    # The output goes with the square of x and must not overflow in fp16.
    x = probe((rows, hidden), dtype, scale=0.01 if dtype == torch.float16 else 0.05).to(DEVICE)
    ids, weights = route(x, router, top_k, normalize=True)
    return x, ids, weights, gate_up, down, router


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 3, 8, 11])
@pytest.mark.parametrize("hidden, width", [(512, 392), (2048, 768), (1000, 1416), (8200, 136)])
def test_every_schedule_has_the_bytes_of_linear_and_of_rows_by_expert(hidden, width, top_k, dtype):
    x, ids, weights, gate_up, down, _ = operands(5, hidden, width, top_k, dtype)
    weights[3] = -weights[3]
    layout = PackedSequences.of([0, 2], [1, 3])  # row 1 is filler
    expected = torch.zeros_like(x)
    for row in (0, 2, 3, 4):
        parts = []
        for slot, expert in enumerate(ids[row].tolist()):
            packed = linear(x[row : row + 1], gate_up[expert])
            activated = glu(*(part.contiguous() for part in packed.chunk(2, dim=-1)), "silu")
            parts.append(weights[row, slot] * linear(activated, down[expert])[0].float())
        expected[row] = functools.reduce(torch.add, parts).to(dtype)
    numbers = layout.tables(DEVICE)
    given = x, ids, weights, gate_up, down
    for schedule in FEW:
        y = few_rows_fwd(*given, numbers.query_start, numbers.tokens, "silu", schedule)
        assert same_bytes(y, expected), schedule
    y, _, routed = cuda.experts_fwd(*given, layout, "silu", True)
    assert routed is not None and same_bytes(y, expected)


def test_a_row_with_impossible_ids_gives_nan_and_the_others_do_not_notice():
    x, ids, weights, gate_up, down, _ = operands(4, 512, 392, 4)
    layout = PackedSequences.of([0], [4])
    expected = experts(x, ids, weights, gate_up, down, layout, activation="silu")
    ids[0, 3], ids[1, 0], ids[2] = EXPERTS, -(1 << 30), ids[2].flip(0)
    numbers = layout.tables(DEVICE)
    given = x, ids, weights, gate_up, down, numbers.query_start, numbers.tokens, "silu"
    for schedule in FEW:
        y = few_rows_fwd(*given, schedule)
        assert y[:3].isnan().all() and same_bytes(y[3], expected[3])


def test_a_replay_follows_the_router_whatever_the_replay_before_chose():
    """The second kernel asks for weights by the ids that lie there before it waits."""
    rows, layers = MOST_FEW, 6
    x, *_, gate_up, down, router = operands(rows, 2048, 768, 8)
    layout = PackedSequences.of([0], [rows])
    layout.tables(DEVICE)

    def step():
        h = x
        for _ in range(layers):
            ids, weights = route(h, router, 8, normalize=True)
            h = experts(h, ids, weights, gate_up, down, layout, activation="silu") + h
        return h

    with torch.no_grad():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(8):
            x.copy_(probe(x.shape, x.dtype, seed=seed, scale=0.5))
            graph.replay()
            found = captured.clone()
            assert same_bytes(found, step())
