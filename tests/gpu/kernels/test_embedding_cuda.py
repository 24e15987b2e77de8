"""Embedding on a GPU: a gather, and a gradient in token order without atomics."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.embedding import embedding
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.embedding.test_embedding import (
    VOCABULARY,
    H,
    test_copies_the_rows,  # noqa: F401
    test_gradient_adds_tokens_in_their_order,  # noqa: F401
    test_padding_row_receives_no_gradient,  # noqa: F401
    token_ids,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return "cuda"


@pytest.mark.large
def test_offsets_beyond_31_bits():
    weight = torch.empty(2**19 + 8, 4096 + 8, device="cuda", dtype=torch.bfloat16)
    weight[-8:] = probe((8, 4096 + 8), torch.bfloat16).cuda()
    ids = torch.arange(8, device="cuda") + 2**19
    assert same_bytes(embedding(ids, weight), weight[-8:])


def test_a_captured_graph_equals_eager_and_shows_ids_outside_the_table():
    weight, ids = probe((VOCABULARY, H), torch.bfloat16).cuda(), token_ids("cuda")
    expected = embedding(ids, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = embedding(ids, weight)
    graph.replay()
    assert same_bytes(y, expected)
    ids[3], ids[5] = VOCABULARY, -1
    graph.replay()
    assert y[3].isnan().all() and y[5].isnan().all()
    assert same_bytes(y[6:], expected[6:])
