import pytest
import torch
import torch.nn.functional as F

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.kernels.rms_norm import norm_triton
from rl_consistency.kernels.rms_norm.norm_triton import (
    Rows,
    fits,
    rms_norm_bwd,
    rms_norm_fwd,
    rows_of,
)
from rl_consistency.kernels.rms_norm.schedules import (
    MAX_WIDTH,
    NARROW,
    NarrowSchedule,
    NormSchedule,
    block_width,
    pick_backward,
    pick_forward,
    within_shared,
)
from rl_consistency.parity.bytes import same_bytes

TOKENS, EPS = 35, 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def grouped_tree(x):
    """The order's tree over H, from the tree of `row_reduction`."""
    width = block_width(x.shape[-1])
    groups = F.pad(x, (0, width - x.shape[-1])).unflatten(-1, (width // 8, 8))
    return tree_sum(groups.transpose(-1, -2).flatten(-2))


def forward_in_order(x, weight):
    wide = x.float()
    # torch.sqrt does not round correctly on every CPU; a GPU's and the interpreter's do.
    root = (grouped_tree(wide * wide) / x.shape[-1] + EPS).double().sqrt().float()
    rstd = 1.0 / root
    return ((wide * rstd.unsqueeze(-1)) * weight.float()).to(x.dtype), rstd.flatten()


def backward_in_order(dy, x, weight, rstd, heads):
    rstd, dy = rstd.view(*x.shape[:-1], 1), dy.float()
    normalized = x.float() * rstd
    weighted = dy * weight.float()
    mean = (grouped_tree(weighted * normalized) / x.shape[-1]).unsqueeze(-1)
    dx = (rstd * (weighted - normalized * mean)).to(x.dtype)
    rows = (dy * normalized).view(-1, 2 * heads, x.shape[-1])
    sums = torch.zeros(rows.shape[0] // 8, x.shape[-1])
    for pair in tree_sum(rows, dim=1).view(-1, 8, x.shape[-1]).unbind(1):
        sums += pair
    return dx, sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 96), (16, 3, 24)])
def test_both_directions_are_the_order_as_bytes(shape, dtype):
    x, dy, weight = probe(shape, dtype), probe(shape, dtype, seed=3), probe(shape[-1:], dtype, 1)
    heads = shape[1] if len(shape) == 3 else 1
    y, total, rstd = rms_norm_fwd(x, None, weight, EPS)
    expected, expected_rstd = forward_in_order(x, weight)
    assert same_bytes(rstd, expected_rstd) and same_bytes(y, expected)
    assert total.numel() == 0
    dx, sums = rms_norm_bwd(dy, None, x, weight, rstd, heads, True)
    for ours, wanted in zip((dx, sums), backward_in_order(dy, x, weight, rstd, heads), strict=True):
        assert same_bytes(ours, wanted)


def narrow_bwd(dy, dtotal, x, weight, rstd, heads, with_sums, schedule=NARROW):
    """`rms_norm_bwd` by the kernel for narrow rows alone."""
    rows = [rows_of(t) for t in (dy, x, dtotal) if t is not None]
    assert all(fits(r, x.shape[-1], len(rstd), heads) for r in rows)
    return rms_norm_bwd(dy, dtotal, x, weight, rstd, heads, with_sums, schedule)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 64), (16, 1, 64), (35, 1, 128), (35, 3, 100), (17, 5, 128), (33, 8, 128), (19, 2, 256)],
)
def test_narrow_rows_give_the_bytes_of_the_other_kernel(shape, dtype):
    tokens, heads, width = shape
    projected = probe((tokens, 2 * heads + 1, width), dtype)
    weight = probe((width,), dtype, seed=1)
    dy, dtotal = probe(shape, dtype, seed=3), probe(shape, dtype, seed=4)
    x = projected[:, heads : 2 * heads]
    rstd = rms_norm_fwd(x, None, weight, EPS)[2]
    for added, with_sums in ((None, True), (dtotal, True), (x, False)):
        operands = dy, added, x, weight, rstd, heads, with_sums
        expected = rms_norm_bwd(*operands, pick_backward(width, heads))
        for found in (narrow_bwd(*operands), rms_norm_bwd(*operands)):
            assert all(map(same_bytes, found, expected)), (added is None, with_sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 3, 96), (16, 8, 128), (16, 2, 256)])
def test_narrow_rows_are_the_order_as_bytes(shape, dtype):
    x, dy, weight = probe(shape, dtype), probe(shape, dtype, seed=3), probe(shape[-1:], dtype, 1)
    rstd = rms_norm_fwd(x, None, weight, EPS)[2]
    found = narrow_bwd(dy, None, x, weight, rstd, shape[1], True)
    expected = backward_in_order(dy, x, weight, rstd, shape[1])
    assert all(map(same_bytes, found, expected))


def test_every_schedule_of_narrow_rows_gives_the_same_bytes():
    x, dy, weight = probe((TOKENS, 8, 16)), probe((TOKENS, 8, 16), seed=3), probe((16,), seed=1)
    dy[:16] = -0.0
    rstd = rms_norm_fwd(x, None, weight, EPS)[2]
    operands = dy, None, x, weight, rstd, 8, True
    expected = rms_norm_bwd(*operands, NormSchedule(4))
    for rows, loops in ((1, 1), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2), (16, 4), (32, 1)):
        found = narrow_bwd(*operands, NarrowSchedule(rows=rows, loops=loops, registers=128))
        assert all(map(same_bytes, found, expected)), (rows, loops)


def test_narrow_rows_have_a_kernel_of_their_own(monkeypatch):
    taken = []
    kernel = {(i,): lambda *operands, **options: taken.append(options) for i in range(99)}
    monkeypatch.setattr(norm_triton, "_narrow_kernel", kernel)

    def takes(x, heads, *schedule):
        taken.clear()
        rstd, weight = torch.ones(x.shape[:-1].numel()), torch.ones(x.shape[-1])
        rms_norm_bwd(torch.ones_like(x), None, x, weight, rstd, heads, True, *schedule)
        return bool(taken)

    x = torch.ones(TOKENS, 6, 64)
    assert takes(x, 6) and takes(x, 3) and takes(x[:, :4], 4) and takes(x.view(-1, 64), 6)
    assert takes(torch.ones(2, 3, 256), 3)
    assert not takes(x[:, :4], 2)
    assert not takes(x, 1)
    assert not takes(torch.ones(2, 3, 264), 3)
    assert not takes(x, 6, NormSchedule(4))


def test_what_the_kernel_of_narrow_rows_cannot_address():
    rows = 2**31 - 2 * 16 * 8 - 1

    def fitting(outer, inner, count, num_rows=80):
        return fits(Rows(None, outer, inner, count), 128, num_rows, 8)

    assert fitting(128, 0, 1, rows)
    assert not fitting(128, 0, 1, rows + 1)
    assert fitting(2**26, 128, 8)
    assert not fitting(2**27, 128, 8)
    assert fitting(2**23, 0, 1)
    assert not fitting(2**24, 0, 1)
    assert not fitting(128, 2**28, 8)
    assert not fitting(512, 128, 4)


def test_chunks_that_are_no_power_of_two_of_rows_go_side_by_side():
    x, dy, weight = (probe(shape) for shape in ((TOKENS, 3, 40), (TOKENS, 3, 40), (40,)))
    rstd = rms_norm_fwd(x, None, weight, EPS)[2]
    expected = rms_norm_bwd(dy, None, x, weight, rstd, 3, True)
    for split in (2, 8):
        schedule = NormSchedule(4, split=split)
        found = rms_norm_bwd(dy, None, x, weight, rstd, 3, True, schedule)
        assert all(map(same_bytes, found, expected))


def test_rows_and_strides_do_not_matter():
    wide, weight = probe((TOKENS, 3, 64)), probe((64,), seed=1)
    x = wide[:, 1:]
    y, _, rstd = rms_norm_fwd(x.contiguous(), None, weight, EPS)
    for view in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
        assert same_bytes(rms_norm_fwd(view, None, weight, EPS)[0], y)
        dx = rms_norm_bwd(view, None, view, weight, rstd, 2, False)[0]
        assert same_bytes(dx, rms_norm_bwd(x.contiguous(), None, x, weight, rstd, 2, False)[0])
    assert same_bytes(rms_norm_fwd(x[5:6], None, weight, EPS)[0], y[5:6])
    expanded = torch.ones(1, 1, 64).expand(TOKENS, 2, 64)
    dx = rms_norm_bwd(expanded, None, x, weight, rstd, 2, False)[0]
    assert same_bytes(dx, rms_norm_bwd(torch.ones_like(x), None, x, weight, rstd, 2, False)[0])


def test_nothing_gives_nothing():
    weight = torch.ones(8)
    y, total, rstd = rms_norm_fwd(torch.zeros(0, 8), None, weight, EPS)
    assert (y.shape, total.numel(), rstd.numel()) == ((0, 8), 0, 0)
    dx, sums = rms_norm_bwd(y, None, y, weight, rstd, 1, True)
    assert (dx.shape, sums.shape) == ((0, 8), (0, 8))


def test_rows_wider_than_a_program_are_refused():
    with pytest.raises(ValueError, match=r"rows of 16385 elements on a GPU; at most 16384"):
        pick_forward(MAX_WIDTH + 1)


def test_every_width_has_schedules():
    for width in (1, 63, 64, 128, 1000, 4096, 5120, MAX_WIDTH):
        assert pick_forward(width) and pick_backward(width, 1)
    assert pick_backward(128, 64).warps > pick_backward(128, 8).warps
    assert within_shared(NormSchedule(8, stages=3), 64 * 1024, 96 * 1024).stages == 2
    assert within_shared(NormSchedule(8, stages=3), 256 * 1024, 96 * 1024).stages == 1
