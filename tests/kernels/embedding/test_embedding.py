import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.pointwise.embedding import embedding, embedding_fwd, embedding_reference
from rl_consistency.parity.bytes import same_bytes

VOCABULARY, H, TOKENS = 7, 40, 160


@pytest.fixture
def device():
    return "cpu"


def token_ids(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).to(device)


def gradient(device, dtype=torch.float32, cuts=(), filler=0, padding_idx=None):
    """Gradient of the table over successive backward passes; filler tokens get no gradient."""
    ids, dy = token_ids(device), probe((TOKENS, H), dtype, seed=1).to(device)
    weight = nn.Parameter(probe((VOCABULARY, H), dtype).to(device))
    weight.grad_dtype = torch.float32
    buffer = GradientBuffer(weight)
    for start, stop in itertools.pairwise([0, *cuts, TOKENS]):
        rows = F.pad(ids[start:stop], (filler, filler))
        y = embedding(rows, weight, padding_idx=padding_idx, weight_grad=buffer)
        y.backward(F.pad(dy[start:stop], (0, 0, filler, filler)))
    return weight.grad.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 40, 100, 4096, 5000])
def test_copies_the_rows(hidden, dtype, device):
    weight, ids = probe((VOCABULARY, hidden), dtype).to(device), token_ids(device).view(8, 20)
    y = embedding(ids, weight)
    assert y.dtype == dtype and same_bytes(y.double(), embedding_reference(ids, weight))
    assert same_bytes(embedding(ids[3, 5:9], weight), y[3, 5:9])


def test_gradient_adds_tokens_in_their_order(device):
    expected = torch.zeros(VOCABULARY, H)
    for token, row in zip(token_ids().tolist(), probe((TOKENS, H), seed=1).bfloat16(), strict=True):
        expected[token] += row
    for cuts in ((), [16], [32, 48], list(range(16, TOKENS, 16))):
        assert same_bytes(gradient(device, torch.bfloat16, cuts), expected), cuts
    assert same_bytes(gradient(device, torch.bfloat16, [48], filler=16), expected)


def test_without_a_buffer_the_gradient_has_the_dtype_of_the_table():
    weight = probe((VOCABULARY, H), torch.bfloat16).requires_grad_()
    embedding(token_ids(), weight).backward(probe((TOKENS, H), torch.bfloat16, seed=1))
    assert same_bytes(weight.grad, gradient("cpu", torch.bfloat16).bfloat16())


def test_padding_row_receives_no_gradient(device):
    expected = gradient(device)
    assert expected[3].any()
    expected[3] = 0.0
    assert same_bytes(gradient(device, cuts=[48], padding_idx=3), expected)


def test_bad_operands_are_refused():
    weight = probe((VOCABULARY, H))
    with pytest.raises(TypeError, match=r"token ids are torch.int32; they must be int64"):
        embedding(torch.zeros(3, dtype=torch.int32), weight)
    for ids, span in ((torch.tensor([0, 7]), r"\[0, 7\]"), (torch.tensor([-1, 2]), r"\[-1, 2\]")):
        with pytest.raises(ValueError, match=rf"token ids span {span}, the table has 7 rows"):
            embedding(ids, weight)
    with pytest.raises(TypeError, match="weight is torch.float64"):
        embedding(token_ids(), weight.double())


# The kernel, in Triton's interpreter.

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_copies_the_rows(dtype):
    weight, ids = probe((7, 40), dtype), torch.tensor([6, 0, 3, 3])
    assert same_bytes(embedding_fwd(ids, weight), weight[ids])
    assert same_bytes(embedding_fwd(ids, weight.t().contiguous().t()), weight[ids])


@interpreted
def test_an_id_outside_the_table_gives_a_row_of_nan():
    y = embedding_fwd(torch.tensor([7, 2, -1]), probe((7, 40)))
    assert y.isnan().all(dim=1).tolist() == [True, False, True]


@interpreted
def test_no_tokens_give_no_rows():
    assert embedding_fwd(torch.zeros(0, dtype=torch.int64), probe((7, 40))).shape == (0, 40)
