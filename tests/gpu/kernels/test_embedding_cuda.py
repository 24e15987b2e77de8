"""Embedding on a GPU: a gather, and a gradient in token order without atomics."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe, probe_tokens
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.pointwise.embedding import embedding, embedding_reference
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.gpu

VOCABULARY, H, TOKENS = 1000, 320, 512
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUTS = ([16], [32, 48], [496], list(range(16, TOKENS, 16)))


def token_ids():
    return torch.tensor(probe_tokens([TOKENS], VOCABULARY)[0])


def gradient(op, cuts, dtype, device="cuda", filler=0, padding_idx=None):
    """Gradient of the table over successive backward passes; filler tokens get no gradient."""
    ids, dy = token_ids().to(device), probe((TOKENS, H), dtype, seed=1).to(device)
    weight = nn.Parameter(probe((VOCABULARY, H), dtype).to(device))
    weight.grad_dtype = torch.float32
    options = {"weight_grad": GradientBuffer(weight)} if op is embedding else {}
    for start, stop in itertools.pairwise([0, *cuts, TOKENS]):
        rows = F.pad(ids[start:stop], (filler, filler))
        dy_rows = F.pad(dy[start:stop], (0, 0, filler, filler))
        op(rows, weight, padding_idx=padding_idx, **options).backward(dy_rows)
    return weight.grad.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 8, 100, 320, 4096, 5000])
def test_copies_the_rows(hidden, dtype):
    weight = probe((VOCABULARY, hidden), dtype).cuda()
    ids = token_ids().view(8, 64).cuda()
    y = embedding(ids, weight)
    assert y.dtype == dtype
    assert same_bytes(y.double(), embedding_reference(ids, weight))
    assert same_bytes(embedding(ids[3, 5:9], weight), y[3, 5:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_has_the_bytes_of_the_cpu_at_any_cut(dtype):
    # An fp32 table has an fp64 buffer on a GPU, one of 16 bits an fp32 buffer on both.
    device = "cuda" if dtype == torch.float32 else "cpu"
    expected = gradient(embedding, [], dtype, device=device)
    for cuts in ([], [], *CUTS):
        assert same_bytes(gradient(embedding, cuts, dtype), expected), cuts
    assert same_bytes(gradient(embedding, [48], dtype, filler=16), expected)


def test_padding_row_receives_no_gradient():
    padding = int(token_ids().mode().values)
    expected = gradient(embedding, [], torch.bfloat16)
    assert expected[padding].any()
    expected[padding] = 0.0
    assert same_bytes(gradient(embedding, [48], torch.bfloat16, padding_idx=padding), expected)


@pytest.mark.large
def test_offsets_beyond_31_bits():
    weight = torch.empty(2**19 + 8, 4096 + 8, device="cuda", dtype=torch.bfloat16)
    weight[-8:] = probe((8, 4096 + 8), torch.bfloat16).cuda()
    ids = torch.arange(8, device="cuda") + 2**19
    assert same_bytes(embedding(ids, weight), weight[-8:])


def test_a_captured_graph_equals_eager_and_shows_ids_outside_the_table():
    weight, ids = probe((VOCABULARY, H), torch.bfloat16).cuda(), token_ids().cuda()
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
