import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.rotary.op import rotary, rotary_reference, rotary_table
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import judged, rows_alike

TOKENS, HEADS, KV_HEADS, D = 70, 4, 2, 32
INV_FREQ = 1e4 ** (-torch.arange(0, D, 2).float() / D)
POSITIONS = torch.arange(TOKENS) * 37 % 2000


def operands(dtype=torch.float32):
    return probe((TOKENS, HEADS, D), dtype), probe((TOKENS, KV_HEADS, D), dtype, seed=1)


def rotated(q, k, positions, rows=2048):
    table = rotary_table(INV_FREQ, rows)
    return rotary(q, k, table[0, positions], table[1, positions])


def judged_rows(op, q, k):
    """The law of rows; `op` maps (q, k, positions) to two tensors."""
    joined = lambda *rows: torch.cat(op(*rows), dim=1)  # noqa: E731
    return judged(rows_alike, "q and k", joined, q, k, POSITIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_fp64(dtype):
    for ours, x in zip(rotated(*operands(dtype), POSITIONS), operands(dtype), strict=True):
        assert ours.dtype == dtype
        assert_within(ours, rotary_reference(x, INV_FREQ, POSITIONS), "elementwise", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_match_fp64(dtype):
    leaves = [x.requires_grad_() for x in operands(dtype)]
    for seed, (ours, x) in enumerate(zip(rotated(*leaves, POSITIONS), leaves, strict=True)):
        dy = probe(tuple(x.shape), dtype, seed=seed + 5)
        ours.backward(dy, retain_graph=True)
        exact = x.detach().double().requires_grad_()
        rotary_reference(exact, INV_FREQ, POSITIONS).backward(dy.double())
        assert_within(x.grad, exact.grad, "elementwise", dtype, gradient=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_bitwise_per_position(dtype):
    q, k = operands(dtype)
    assert judged_rows(rotated, q, k).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_bitwise_per_position(dtype):
    q, k = operands(dtype)

    def gradients(dq, dk, positions):
        leaves = [
            torch.zeros_like(dq, requires_grad=True),
            torch.zeros_like(dk, requires_grad=True),
        ]
        torch.autograd.backward(rotated(*leaves, positions), [dq, dk])
        return [leaf.grad for leaf in leaves]

    assert judged_rows(gradients, q, k).passed


def test_table_rows_do_not_depend_on_its_length():
    long = rotary_table(INV_FREQ, 5000, 1.3)
    for rows in (1, 2, 17, 1024):
        assert same_bytes(rotary_table(INV_FREQ, rows, 1.3), long[:, :rows])
    assert rotary_table(INV_FREQ, 0).shape == (2, 0, D // 2)


def test_table_is_the_rounded_fp64_cosine():
    positions = torch.arange(100000, dtype=torch.float64)
    exact = (positions[:, None] * INV_FREQ.double()).cos()
    assert same_bytes(rotary_table(INV_FREQ, 100000)[0], exact.float())


def test_strides_do_not_matter():
    q, k = operands()
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    for ours, expected in zip(rotated(*strided, POSITIONS), rotated(q, k, POSITIONS), strict=True):
        assert same_bytes(ours, expected)


def test_no_tokens_give_no_tokens():
    q, k = rotated(*(x[:0] for x in operands()), POSITIONS[:0])
    assert q.shape == (0, HEADS, D) and k.shape == (0, KV_HEADS, D)


def test_bad_operands_are_refused():
    q, k = operands()
    cos, sin = rotary_table(INV_FREQ, TOKENS)
    with pytest.raises(ValueError, match=r"cos \(69, 16\).*must be \(70, 16\)"):
        rotary(q, k, cos[1:], sin)
    with pytest.raises(TypeError, match=r"cos is torch.bfloat16.*must be float32"):
        rotary(q, k, cos.bfloat16(), sin)
    with pytest.raises(TypeError, match="k is torch.bfloat16 but q is torch.float32"):
        rotary(q, k.bfloat16(), cos, sin)


def test_a_position_rounded_with_its_batch_fails_the_same_check():
    """Positions counted from the padded column: a token's angle then depends on its neighbours."""
    q, k = operands()

    def mutant(q, k, positions):
        return rotated(q, k, positions - positions.min())

    assert judged_rows(mutant, q, k).mismatches > 0
