"""Schedules of attention on a GPU: every entry, every spread of the keys and every captured launch
gives the same bytes."""

from functools import partial

import pytest
import torch
from triton.runtime.errors import OutOfResources

from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.hopper import backward
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    BACKWARD_WIDE,
    DECODE,
    FIVE_PRODUCTS,
    PREFILL,
    PREFILL_HOPPER,
    PREFILL_POINTERS,
    SEVEN_PRODUCTS,
    admits,
    backward_entries,
    forward_entries,
    pick_specialized,
)
from rl_consistency.kernels.core.device import has_wgmma
from tests.gpu.kernels.attention.attention_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    LENGTHS,
    LONG,
    MAIN,
    Case,
    all_same,
    at_edges,
    attend,
    cached_keys,
    decoded,
    drawn,
    name,
    packed,
    paged_layout,
    together,
)
from tests.kernels.attention import layouts

pytestmark = pytest.mark.gpu


def within_resources(call):
    """None where a schedule asks for more than the device has."""
    try:
        return call()
    except OutOfResources:
        return None


SCHEDULE_CASES = (
    *(MAIN, Case(BF16, 64, 100), Case(FP32, 32), Case(FP16, 80), Case(BF16, 256)),
    *(Case(BF16, 96, 300, heads=14), Case(BF16, 48, heads=6), Case(FP16, 176, 200)),
    *(Case(BF16, 80, 100, heads=6), Case(FP16, 96, heads=2)),
)


BORDERS = [1, 63, 64, 65, 127, 0, 128, 129, 191, 192, 193, 1000, 16, 2300]
"""Lengths around the borders of a tile."""


def assert_same_bytes_where_they_fit(calls):
    """Results of all calls agree; at least two must fit into the device's resources."""
    results = together([partial(within_resources, call) for call in calls])
    fitting = [found for found in results if found is not None]
    assert len(fitting) >= 2
    for call, found in zip(calls, results, strict=True):
        assert found is None or all_same(found, fitting[0]), call.keywords
    return results


@pytest.mark.parametrize("case", SCHEDULE_CASES, ids=name)
def test_every_prefill_schedule_gives_the_same_bytes(case):
    q, k, v, _, layout = packed(case, range(len(LENGTHS)))
    table = [s for s in forward_entries(PREFILL, case.dtype) if admits(s, layout, q, k, v)]
    call = partial(attention_fwd, q, k, v, layout, *case.options.values())
    results = assert_same_bytes_where_they_fit([partial(call, schedule=s) for s in table])
    for schedule, found in zip(table, results, strict=True):
        assert found is not None or not schedule.specialized


@pytest.mark.parametrize("dim", [72, 80, 96])
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("dtype, heads, kv_heads", [(BF16, 8, 2), (FP16, 4, 4), (BF16, 3, 1)])
def test_prefill_of_heads_that_leave_columns_empty_gives_the_bytes_of_plain_kernels(
    dim, window, dtype, heads, kv_heads
):
    """Short sequences around the borders of a tile, several tiles to a program. Heads lie 128
    columns apart: those of 72 and 88 side by side would not be on lines of 32 bytes."""
    case = Case(dtype, 128, window, heads, kv_heads)
    lengths = BORDERS * 6
    q, k, v = (x[..., :dim] for x in drawn(case, sum(lengths), 0)[:3])
    layout = layouts.packed(lengths)
    if not admits(PREFILL_HOPPER, layout, q, k, v):
        pytest.skip("needs sm_90")
    call = partial(attention_fwd, q, k, v, layout, *case.options.values())
    plain = call(schedule=PREFILL_POINTERS)
    for _ in range(5):
        assert all_same(call(schedule=PREFILL_HOPPER), plain)


@pytest.mark.parametrize("case", SCHEDULE_CASES, ids=name)
def test_every_decode_schedule_gives_the_same_bytes(case):
    takes = has_wgmma(DEVICE)
    calls = [
        partial(decoded, case, schedule=s, programs_per_tile=n)
        for s in forward_entries(DECODE, case.dtype)
        for n in (1, 5)
        if takes or not s.ring
    ]
    prefill = partial(lambda: at_edges(attend(case, [0])[0]))
    assert_same_bytes_where_they_fit([prefill, *calls])


@pytest.mark.parametrize("case", SCHEDULE_CASES, ids=name)
def test_every_backward_schedule_gives_the_same_bytes(case):
    q, k, v, do, layout = packed(case, range(len(LENGTHS)))
    o, lse = attention_fwd(q, k, v, layout, *case.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *case.options.values())
    by_query, by_key = (backward_entries(t, q.dtype) for t in (BACKWARD_QUERIES, BACKWARD_KEYS))
    by_key = [s for s in by_key if admits(s, layout, do, q, k, v)]
    calls = [partial(call, query_schedule=s) for s in by_query]
    assert_same_bytes_where_they_fit(calls + [partial(call, key_schedule=s) for s in by_key])


@pytest.fixture(params=[1, 2, 8], ids="{} heads".format)
def programs(request, monkeypatch):
    """For how many heads the programs of the backward pass are."""
    monkeypatch.setattr(
        backward,
        "_heads_of_a_program",
        lambda layout, kv, group, *_: min(request.param, group),
    )


def assert_specialised_warps_give_the_bytes_of_plain_kernels(case, lengths, schedule):
    """Also where a row of another sequence lies behind the last one."""
    starts = [sum(lengths[:i]) + 16 * i for i in range(len(lengths))]
    q, k, v, do = drawn(case, starts[-1] + lengths[-1] + 16, 0)
    layout = PackedSequences.of(starts, lengths)
    if not admits(schedule, layout, do, q, k, v):
        pytest.skip("needs sm_90")
    o, lse = attention_fwd(q, k, v, layout, *case.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *case.options.values())
    plain = BACKWARD_WIDE if case.dim > 128 else BACKWARD_QUERIES[0]
    two_kernels = call(query_schedule=plain)
    for _ in range(5):
        assert all_same(call(key_schedule=schedule), two_kernels)


@pytest.mark.parametrize("dim", [48, 64, 80, 96, 128])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("dtype, heads, kv_heads", [(BF16, 8, 2), (FP16, 4, 4), (BF16, 3, 1)])
def test_chains_of_dq_handed_on_give_the_same_bytes(dim, window, dtype, heads, kv_heads, programs):
    """Every length around the borders of a tile, so short that most programs are the first and the
    last."""
    assert_specialised_warps_give_the_bytes_of_plain_kernels(
        Case(dtype, dim, window, heads, kv_heads), BORDERS, FIVE_PRODUCTS
    )


@pytest.mark.parametrize(
    "case, lengths",
    [
        (Case(BF16, 128), [8192, 8192]),
        (Case(BF16, 128, heads=16, kv_heads=8), [2048] * 8),
        (Case(BF16, 128, heads=8, kv_heads=1), [1025, 63, 4100]),
        (Case(BF16, 128, window=64), [1500, 127, 129, 5000]),
        (Case(BF16, 128, window=1000, heads=8), [5000, 640, 3000]),
        (Case(BF16, 64, heads=8), [5000, 1, 777, 130]),
        (Case(BF16, 64, window=1000, heads=2), [5000, 1, 777, 130]),
        (Case(FP16, 128, heads=8), [5000, 1, 777, 4097, 130]),
        (Case(FP16, 64, window=64, heads=2), [5000, 200]),
        (Case(BF16, 80, heads=6), [4100, 1, 777, 130]),
        (Case(BF16, 96, heads=16, kv_heads=8), [2048] * 8),
        (Case(BF16, 96, window=1000, heads=8, kv_heads=1), [5000, 640, 3000]),
        (Case(FP16, 88, window=64, heads=14), [1500, 127, 129, 5000]),
        (Case(BF16, 72, heads=5, kv_heads=1), [1025, 63, 4100]),
        (Case(BF16, 112, window=500, heads=14), [2500, 300]),
    ],
    ids=str,
)
def test_long_chains_of_dq_handed_on_give_the_same_bytes(case, lengths, programs):
    """More programs of a sequence than run at a time, and groups of one to eight heads."""
    assert_specialised_warps_give_the_bytes_of_plain_kernels(case, lengths, FIVE_PRODUCTS)


@pytest.mark.parametrize("dim", [144, 192, 256])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("dtype, heads, kv_heads", [(BF16, 8, 2), (FP16, 4, 4), (BF16, 3, 1)])
def test_backward_of_wide_heads_gives_the_bytes_of_plain_kernels(
    dim, window, dtype, heads, kv_heads
):
    case = Case(dtype, dim, window, heads, kv_heads)
    assert_specialised_warps_give_the_bytes_of_plain_kernels(case, BORDERS, SEVEN_PRODUCTS)


def test_a_captured_backward_pass_gives_the_eager_bytes(programs):
    """Counters start from zero at every replay."""
    q, k, v, do, layout = packed(MAIN, [0, 3])
    o, lse = attention_fwd(q, k, v, layout, *MAIN.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *MAIN.options.values())
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for _ in range(3):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        assert all_same(found, expected)


def test_a_sum_of_dq_that_would_not_fit_is_made_by_two_kernels(monkeypatch):
    q, k, v, do, layout = packed(MAIN, [0, 1])
    o, lse = attention_fwd(q, k, v, layout, *MAIN.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *MAIN.options.values())
    expected = call()
    monkeypatch.setattr(attention_schedules, "CHAIN_BYTES", 1 << 10)
    assert not pick_specialized(layout, do, q, k, v)
    assert all_same(call(), expected)


def test_a_layout_is_not_captured_before_its_first_call():
    layout = paged_layout([(LONG - 1, LONG)], *cached_keys(MAIN))
    with (
        pytest.raises(RuntimeError, match="run the call once, then capture it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layout.tickets(DEVICE, 8)
