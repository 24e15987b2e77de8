import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.embedding.op import embedding, embedding_reference
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import cuts_alike, judged

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


def judged_cuts(op, dtype):
    """The law of cuts for the table."""
    weight = nn.Parameter(probe((VOCABULARY, H), dtype))
    weight.grad_dtype = torch.float32
    options = {"weight_grad": GradientBuffer(weight)} if op is embedding else {}

    def backward(ids, dy):
        op(ids, weight, **options).backward(dy)

    return judged(cuts_alike, (weight,), backward, (token_ids(), probe((TOKENS, H), dtype, seed=1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(TOKENS,), (8, 20)])
def test_copies_the_rows(shape, dtype):
    weight = probe((VOCABULARY, H), dtype)
    ids = token_ids().view(shape)
    assert same_bytes(embedding(ids, weight).double(), embedding_reference(ids, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_matches_fp64(dtype):
    exact = torch.zeros(VOCABULARY, H, dtype=torch.float64)
    exact.index_add_(0, token_ids(), probe((TOKENS, H), dtype, seed=1).double())
    assert_within(gradient(embedding, [], dtype), exact, "reduction", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_does_not_depend_on_the_cut(dtype):
    assert judged_cuts(embedding, dtype).passed
    # Whole steps of filler before the tokens as well.
    whole = gradient(embedding, [], dtype)
    assert same_bytes(gradient(embedding, [48], dtype, filler=16), whole)


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


def test_non_contiguous_operands_give_the_same_bytes():
    weight = probe((VOCABULARY, H)).t().contiguous().t().requires_grad_()
    ids = token_ids().view(8, 20).t()
    y = embedding(ids, weight)
    assert same_bytes(y, weight.detach()[ids])
    y.backward(probe((H, 20, 8), seed=1).permute(1, 2, 0))
    assert torch.isfinite(weight.grad).all()


def test_no_tokens_give_no_rows_and_zero_gradient():
    weight = probe((VOCABULARY, H)).requires_grad_()
    y = embedding(torch.zeros(0, dtype=torch.int64), weight)
    assert y.shape == (0, H)
    y.sum().backward()
    assert same_bytes(weight.grad, torch.zeros(VOCABULARY, H))


def test_bad_operands_are_refused():
    weight = probe((VOCABULARY, H))
    with pytest.raises(TypeError, match=r"token ids are torch.int32; they must be int64"):
        embedding(torch.zeros(3, dtype=torch.int32), weight)
    for ids, span in ((torch.tensor([0, 7]), r"\[0, 7\]"), (torch.tensor([-1, 2]), r"\[-1, 2\]")):
        with pytest.raises(ValueError, match=rf"token ids span {span}, the table has 7 rows"):
            embedding(ids, weight)
    with pytest.raises(TypeError, match="weight is torch.float64"):
        embedding(token_ids(), weight.double())


def test_torch_embedding_fails_the_same_check():
    assert judged_cuts(F.embedding, torch.float32).mismatches > 0
