import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.pointwise.embedding import embedding, embedding_reference
from rl_consistency.parity.bytes import same_bytes

VOCABULARY, H, TOKENS = 7, 40, 160


def token_ids():
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))


def gradient(op, cuts, dtype, filler=0):
    """Gradient of the table over successive backward passes; filler tokens get no gradient."""
    ids, dy = token_ids(), probe((TOKENS, H), dtype, seed=1)
    weight = nn.Parameter(probe((VOCABULARY, H), dtype))
    weight.grad_dtype = torch.float32
    options = {"weight_grad": GradientBuffer(weight)} if op is embedding else {}
    edges = [0, *cuts, TOKENS]
    for start, stop in itertools.pairwise(edges):
        rows = F.pad(ids[start:stop], (filler, filler))
        op(rows, weight, **options).backward(F.pad(dy[start:stop], (0, 0, filler, filler)))
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(TOKENS,), (8, 20)])
def test_copies_the_rows(shape, dtype):
    weight = probe((VOCABULARY, H), dtype)
    ids = token_ids().view(shape)
    assert same_bytes(embedding(ids, weight).double(), embedding_reference(ids, weight))


def test_gradient_adds_tokens_in_their_order():
    ids, dy = token_ids(), probe((TOKENS, H), seed=1)
    expected = torch.zeros(VOCABULARY, H)
    for token, row in zip(ids.tolist(), dy, strict=True):
        expected[token] += row
    assert same_bytes(gradient(embedding, [], torch.float32), expected)


def test_without_a_buffer_the_gradient_has_the_dtype_of_the_table():
    weight = probe((VOCABULARY, H), torch.bfloat16).requires_grad_()
    embedding(token_ids(), weight).backward(probe((TOKENS, H), torch.bfloat16, seed=1))
    assert same_bytes(weight.grad, gradient(embedding, [], torch.bfloat16).bfloat16())


def test_padding_row_receives_no_gradient():
    weight = probe((VOCABULARY, H)).requires_grad_()
    dy = probe((TOKENS, H), seed=1)
    embedding(token_ids(), weight, padding_idx=3).backward(dy)
    expected = gradient(embedding, [], torch.float32)
    expected[3] = 0.0
    assert same_bytes(weight.grad, expected)


def test_bad_operands_are_refused():
    weight = probe((VOCABULARY, H))
    with pytest.raises(TypeError, match=r"token ids are torch.int32; they must be int64"):
        embedding(torch.zeros(3, dtype=torch.int32), weight)
    for ids, span in ((torch.tensor([0, 7]), r"\[0, 7\]"), (torch.tensor([-1, 2]), r"\[-1, 2\]")):
        with pytest.raises(ValueError, match=rf"token ids span {span}, the table has 7 rows"):
            embedding(ids, weight)
    with pytest.raises(TypeError, match="weight is torch.float64"):
        embedding(token_ids(), weight.double())
