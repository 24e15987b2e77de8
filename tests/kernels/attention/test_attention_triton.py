"""The CUDA schedules of attention in Triton's interpreter: their logic, not their bits."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention import op as cpu
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.cpu import attention_cpu_bwd
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.hopper.backward import statistics_of
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_reference
from rl_consistency.kernels.attention.paged_cache_triton import write_cache
from rl_consistency.kernels.attention.schedules import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    DECODE,
    FIVE_PRODUCTS,
    LOG2E,
    PREFILL,
    PREFILL_HOPPER,
    SEVEN_PRODUCTS,
    AttentionSchedule,
    key_block,
    pick_specialized,
)
from rl_consistency.kernels.attention.tiles_triton import dense
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.verify.checks.attention import chunked, paged_calls
from tests.comparison import assert_within, first_difference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

LENGTHS = (1, 140, 33)
"""Within one block of 128 keys, and over two."""
STARTS, ROWS = (16, 48, 224), 272
"""16 rows of no sequence before each, and some at the end."""
SMALL = AttentionSchedule(rows=16, warps=2, stages=1)

CASES = [
    # dtype, head_dim, query heads, KV heads, window
    (torch.float32, 32, 2, 2, 2),
    (torch.float32, 48, 4, 2, 20),
    (torch.bfloat16, 32, 3, 1, 130),
    (torch.bfloat16, 48, 4, 2, None),
]
every_case = pytest.mark.parametrize("dtype, dim, heads, kv_heads, window", CASES)


def sequence(i, dtype=torch.float32, dim=32, heads=4, kv_heads=2):
    """q, k, v and a cotangent of sequence i; it depends on nothing else."""
    return [
        probe((LENGTHS[i], h, dim), dtype, seed=10 * i + j, scale=s)
        for j, (h, s) in enumerate([(heads, 0.2), (kv_heads, 0.2), (kv_heads, 0.1), (heads, 1.0)])
    ]


def packed(*shape, junk=0.0, **options):
    """q, k, v and a cotangent of all sequences, and where they lie."""
    sequences = [sequence(i, *shape, **options) for i in range(len(LENGTHS))]
    wholes = [torch.full((ROWS, *part.shape[1:]), junk, dtype=part.dtype) for part in sequences[0]]
    for start, parts in zip(STARTS, sequences, strict=True):
        for whole, part in zip(wholes, parts, strict=True):
            whole[start : start + len(part)] = part
    return *wholes, PackedSequences.of(STARTS, LENGTHS)


def owned(x):
    """The rows of each sequence, [3] of [n, ...]."""
    return [x[start : start + n] for start, n in zip(STARTS, LENGTHS, strict=True)]


def same_bytes(one, other):
    return first_difference(*({str(i): t for i, t in enumerate(x)} for x in (one, other))) is None


def in_chunks(n):
    return chunked(n, 60)


def last_alone(n):
    return [n - 1, 1] if n > 1 else [1]


def paged_rows(cut, programs, window=None):
    """o and lse of every sequence, fed in the parts that `cut` gives to a cache of scattered
    blocks whose free slots hold NaN; calls of few rows spread their keys over `programs`."""
    sequences = [sequence(i) for i in range(len(LENGTHS))]
    results = [[] for _ in LENGTHS]
    for turn, call in enumerate(
        paged_calls(
            [cut(n) for n in LENGTHS],
            block_size=16,
            num_layers=1,
            kv_heads=2,
            head_dim=32,
            dtype=torch.float32,
        )
    ):
        caches = [call.paged.key_cache[0], call.paged.value_cache[0]]
        if turn == 0:
            for cache in caches:
                cache.fill_(torch.nan)
        q, k, v = (
            torch.cat([sequences[i][j][start:end] for i, start, end in call.spans])
            for j in range(3)
        )
        write_cache(call.paged, 0, k, v)
        keys, values = (cache.view(-1, 2, 32) for cache in caches)
        sizes = [end - start for _, start, end in call.spans]
        found = attention_fwd(
            q, keys, values, call.paged, 32**-0.5, window,
            schedule=SMALL, programs_per_tile=programs if max(sizes) == 1 else 1,
        )  # fmt: skip
        for (i, _, _), o, lse in zip(call.spans, *(x.split(sizes) for x in found), strict=True):
            results[i].append((o, lse))
    return [tuple(torch.cat(part) for part in zip(*parts, strict=True)) for parts in results]


def assert_gradients(found, expected, dtype):
    for got, wanted in zip(found, expected, strict=True):
        # A lone token's dq and dk are zero but for rounding, hence the floor on the norm.
        error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1.0)
        assert error < (1e-4 if dtype == torch.float32 else 2e-2)


@every_case
def test_forward_matches_fp64_and_the_cpu_schedule(dtype, dim, heads, kv_heads, window):
    q, k, v, _, layout = packed(dtype, dim, heads, kv_heads, junk=torch.nan)
    scale = dim**-0.5
    o, lse = attention_fwd(q, k, v, layout, scale, window)
    cpu_o, cpu_lse = cpu._forward(q, k, v, layout, scale, window)
    for i, (got, got_lse) in enumerate(zip(owned(o), owned(lse), strict=True)):
        own = sequence(i, dtype, dim, heads, kv_heads)[:3]
        exact = attention_reference(*own, scale=scale, window=window)
        assert_within(got, exact, "attention", dtype)
        assert_within(got, owned(cpu_o)[i], "attention", dtype)
        # The CPU sums probabilities that have been rounded to the dtype.
        assert_within(got_lse, owned(cpu_lse)[i], "attention", dtype)


@every_case
def test_gradients_match_the_cpu_schedule(dtype, dim, heads, kv_heads, window):
    q, k, v, do, layout = packed(dtype, dim, heads, kv_heads)
    scale = dim**-0.5
    o, lse = cpu._forward(q, k, v, layout, scale, window)
    call = (do, q, k, v, o, lse, layout, scale, window)
    found, expected = attention_bwd(*call), attention_cpu_bwd(*call)
    for i in range(len(LENGTHS)):
        assert_gradients(*([owned(x)[i] for x in side] for side in (found, expected)), dtype)


@pytest.mark.parametrize(
    "cut, programs, window",
    [(in_chunks, 1, 20), (last_alone, 1, None), (last_alone, 3, 20)],
)
def test_chunks_and_decode_match_the_cpu_schedule(cut, programs, window):
    q, k, v, _, layout = packed()
    expected = cpu._forward(q, k, v, layout, 32**-0.5, window)
    for i, rows in enumerate(paged_rows(cut, programs, window)):
        for got, whole in zip(rows, expected, strict=True):
            assert_within(got, owned(whole)[i], "attention", torch.float32)


def test_tiles_and_programs_give_the_same_bytes():
    q, k, v, _, layout = packed(torch.bfloat16)
    call = (q, k, v, layout, 32**-0.5, None)
    whole = attention_fwd(*call, schedule=AttentionSchedule(rows=64, warps=4, stages=2))
    assert same_bytes(attention_fwd(*call, schedule=SMALL), whole)
    alone, spread = (paged_rows(last_alone, programs) for programs in (1, 2))
    assert all(map(same_bytes, alone, spread))


TWO_KERNELS = list(
    zip(BACKWARD_QUERIES, [s for s in BACKWARD_KEYS if not s.specialized], strict=True)
)


@pytest.mark.parametrize("by_query, by_key", TWO_KERNELS)
def test_every_schedule_matches_the_cpu_schedule(by_query, by_key):
    """Not as bytes: the interpreter rounds once per matrix product, however wide. A schedule with
    descriptors reads by pointer where there are none."""
    q, k, v, do = sequence(2)
    layout = PackedSequences.of([0], [33])
    o, lse = cpu._forward(q, k, v, layout, 32**-0.5, None)
    portable = [s for s in PREFILL if not s.specialized]
    forward = next((s for s in portable if s.rows == by_query.rows), SMALL)
    found = attention_fwd(q, k, v, layout, 32**-0.5, None, schedule=forward)
    for got, wanted in zip(found, (o, lse), strict=True):
        assert_within(got, wanted, "attention", torch.float32)
    call = (do, q, k, v, o, lse, layout, 32**-0.5, None)
    found = attention_bwd(*call, query_schedule=by_query, key_schedule=by_key)
    assert_gradients(found, attention_cpu_bwd(*call), torch.float32)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_a_window_beyond_any_position_is_none(window):
    """Added to a position it would leave the range of 32 bits."""
    q, k, v, do = sequence(2)
    layout, scale = PackedSequences.of([0], [LENGTHS[2]]), 32**-0.5
    results = []
    for reach in (None, window):
        o, lse = attention_fwd(q, k, v, layout, scale, reach)
        results.append((o, lse, *attention_bwd(do, q, k, v, o, lse, layout, scale, reach)))
    assert same_bytes(*results)


def test_rows_of_no_sequence_are_zero_and_minus_infinity():
    q, k, v, do, layout = packed(junk=torch.nan)
    o, lse = attention_fwd(q, k, v, layout, 32**-0.5, None)
    gradients = attention_bwd(do, q, k, v, o, lse, layout, 32**-0.5, None)
    rows = torch.ones(ROWS, dtype=torch.bool)
    for start, n in zip(STARTS, LENGTHS, strict=True):
        rows[start : start + n] = False
    for x in (o, *gradients):
        assert not x[rows].any() and x.isfinite().all()
    assert (lse[rows] == -torch.inf).all() and lse[~rows].isfinite().all()


def test_layouts_without_queries_give_zeros():
    q, k, v, do = sequence(2)
    for layout in (PackedSequences.of([], []), PackedSequences.of([0, 16], [0, 0])):
        o, lse = attention_fwd(q, k, v, layout, 1.0, None)
        assert not o.any() and (lse == -torch.inf).all()
        assert not any(x.any() for x in attention_bwd(do, q, k, v, o, lse, layout, 1.0, None))
    none = q[:0], k[:0], v[:0]
    o, lse = attention_fwd(*none, PackedSequences.of([], []), 1.0, None)
    assert o.shape == (0, 4, 32) and lse.shape == (0, 4)


def test_schedules_of_sm_90_are_refused_where_they_cannot_run():
    q, k, v, do = sequence(2, torch.bfloat16)
    layout = PackedSequences.of([0], [33])
    for schedule, match in (
        (PREFILL_HOPPER, "specialised warps need sm_90"),
        (DECODE[0], "a ring of buffers needs sm_90, a paged cache"),
    ):
        with pytest.raises(ValueError, match=match):
            attention_fwd(q, k, v, layout, 1.0, None, schedule=schedule)
    o, lse = attention_fwd(q, k, v, layout, 1.0, None)
    given = (do, q, k, v, o, lse, layout, 1.0, None)
    for choice in ({}, {"query_schedule": BACKWARD_QUERIES[0]}):
        for schedule in (FIVE_PRODUCTS, SEVEN_PRODUCTS, PREFILL_HOPPER):
            with pytest.raises(ValueError, match="specialised warps need sm_90"):
                attention_bwd(*given, key_schedule=schedule, **choice)
    assert not pick_specialized(layout, do, q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_a_tile_are_those_of_its_queries(dtype):
    """What the kernel of five products reads: lse in log2 units and delta, tile by tile."""
    q, k, v, do, layout = packed(dtype, 64)
    o, lse = attention_fwd(q, k, v, layout, 0.125, None)
    query_tiles, first_tiles = layout.query_tiles(q.device, 64)
    statistics, counters = statistics_of(do, o, lse, layout, 64)
    statistics = statistics.view(4, len(query_tiles), 2, 64)
    assert not counters.any() and len(counters) == 4 * len(query_tiles)
    delta = tree_sum(do.float() * o.float())
    for i, (start, n) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        tiles = statistics[:, first_tiles[i] : first_tiles[i] + -(-n // 64)]
        units, sums = (x.flatten(1, 2).T for x in tiles.unbind(2))
        rows = slice(start, start + n)
        expected = {"lse": lse[rows] * LOG2E, "delta": delta[rows]}
        found = {"lse": units[:n].contiguous(), "delta": sums[:n].contiguous()}
        assert first_difference(found, expected) is None
        assert (units[n:] == torch.inf).all() and not sums[n:].any()


def test_another_key_block_fails_the_same_check(monkeypatch):
    assert [key_block(d) for d in (16, 64, 80, 96, 128, 144, 256)] == [128] * 5 + [64] * 2
    q, k, v, _, layout = packed(torch.bfloat16)
    whole = attention_fwd(q, k, v, layout, 32**-0.5, None)
    monkeypatch.setattr(attention_schedules, "key_block", lambda head_dim: 64)
    assert not same_bytes(attention_fwd(q, k, v, layout, 32**-0.5, None), whole)


def test_a_device_of_little_shared_memory_is_named(monkeypatch):
    monkeypatch.setattr(attention_schedules, "shared_memory", lambda device: 99 << 10)
    q, k = torch.zeros(80, 2, 128), torch.zeros(80, 2, 128)
    layout = PackedSequences.of([0], [80])
    with pytest.raises(ValueError, match="float32 with head_dim 128 needs 136 KB .* has 99 KB"):
        attention_fwd(q, k, k, layout, 1.0, None)


def test_a_call_fills_in_the_rows_of_its_own_sequences():
    q, k, v, _, layout = packed()
    expected = attention_fwd(q, k, v, layout, 0.3, None, schedule=SMALL)
    some, others = (
        PackedSequences.of([STARTS[i] for i in part], [LENGTHS[i] for i in part])
        for part in ([0, 2], [1])
    )
    found = attention_fwd(q, k, v, some, 0.3, None, schedule=SMALL)
    assert not same_bytes(found, expected)
    again = attention_fwd(q, k, v, others, 0.3, None, into=found, schedule=SMALL)
    assert all(x is y for x, y in zip(again, found, strict=True))
    assert same_bytes(found, expected)


def test_operands_that_no_descriptor_can_address_are_copied():
    x = torch.arange(6 * 2 * 16.0).view(6, 2, 16)
    fused = torch.zeros(6, 4, 16)[:, 1:3]
    by_head = torch.zeros(2, 6, 16).transpose(0, 1)
    for addressed in (x, x[:1], x[:, :1], fused, by_head, x[:0]):
        assert dense(addressed) is addressed
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    overlapping = x.flatten().as_strided((6, 2, 16), (8, 4, 1))
    for other in (x[:1].expand(6, 2, 16), x[:, :1].expand(6, 2, 16), last, overlapping):
        copied = dense(other)
        assert copied.is_contiguous() and copied.data_ptr() != other.data_ptr()
        assert torch.equal(copied, other)
    far = torch.empty(1, device="meta").as_strided((6, 3, 16), (16, 1 << 30, 1))
    assert dense(far) is not far and dense(far[:, :1]) is not None
