"""Attention on a GPU: packed, chunked and decoded, alone and among others, forward and backward."""

import itertools
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from rl_consistency.kernels.attention import forward_triton as attention_triton
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.captured_layout import CapturedPagedAttention
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import (
    PackedSequences,
    PagedAttention,
    SequenceTables,
)
from rl_consistency.kernels.attention.op import (
    attention_paged,
    attention_reference,
    attention_varlen,
)
from rl_consistency.kernels.attention.schedules import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    DECODE,
    FIVE_PRODUCTS,
    PREFILL,
    admits,
    backward_entries,
    forward_entries,
    in_five_products,
)
from rl_consistency.kernels.attention.schedules import DECODE_DEEP as DEEP
from rl_consistency.kernels.attention.schedules import DECODE_LAST as LAST
from rl_consistency.kernels.attention.schedules import DECODE_SPREAD as SPREAD
from rl_consistency.kernels.core.device import has_wgmma
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT, assert_within
from rl_consistency.verify.checks.attention import SCORE_SCALE
from rl_consistency.verify.compile_ahead import compile_ahead
from rl_consistency.verify.probe import probe

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

LENGTHS = (4096, 1, 129, 700, 250)
LONG = LENGTHS[0]
EDGES = (0, 1, 127, 128, 129, 255, 256, 2047, 2048, 4095)
"""Positions at which a block of keys, or a part of the context, begins or ends."""
BLOCK = 16
"""Tokens in a block of the cache."""


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for."""

    dtype: torch.dtype
    dim: int
    window: int | None = None
    heads: int = 4
    kv_heads: int = 2

    @property
    def options(self):
        return {"scale": self.dim**-0.5, "window": self.window}


MAIN = Case(BF16, 128)
WINDOWED = Case(BF16, 128, 300)
CASES = (
    MAIN,
    WINDOWED,
    Case(BF16, 64),
    Case(BF16, 80, 100),
    Case(BF16, 256, 200),
    Case(FP16, 96),
    Case(FP32, 64),
)


def same_bytes(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def all_same(one, other):
    return all(map(same_bytes, one, other))


def together(calls):
    """The results of some calls, whose kernels are compiled side by side beforehand."""
    compile_ahead(calls)
    return [call() for call in calls]


def within_resources(call):
    """None where a schedule asks for more than the device has."""
    try:
        return call()
    except OutOfResources:
        return None


def name(case):
    return f"{str(case.dtype)[6:]}-{case.dim}-{case.window}"


def drawn(case, length, seed):
    """q, k, v and a cotangent. Values are small: where two large ones cancel, the rounding of the
    probabilities to 16 bits would exceed any tolerance."""
    sizes = [(case.heads, SCORE_SCALE), (case.kv_heads, SCORE_SCALE), (case.kv_heads, 0.001)]
    return [
        probe((length, heads, case.dim), case.dtype, seed=seed + j, scale=scale).to(DEVICE)
        for j, (heads, scale) in enumerate([*sizes, (case.heads, 0.1)])
    ]


@cache
def sequence(case, i):
    """q, k, v and a cotangent of sequence i; it depends on nothing else."""
    return drawn(case, LENGTHS[i], 10 * i)


def packed(case, members, gap=0, junk=0.0):
    """q, k, v and a cotangent of some sequences with `gap` rows of junk between, and the layout."""
    starts, end = [], gap
    for i in members:
        starts.append(end)
        end += -(-LENGTHS[i] // 16) * 16 + gap
    wholes = [torch.full_like(t[:1], junk).repeat(end, 1, 1) for t in sequence(case, 0)]
    for i, start in zip(members, starts, strict=True):
        for whole, part in zip(wholes, sequence(case, i), strict=True):
            whole[start : start + LENGTHS[i]] = part
    return *wholes, PackedSequences.of(starts, [LENGTHS[i] for i in members])


def by_sequence(members, layout, tensors):
    """{sequence: its rows of each tensor}."""
    return {
        i: [t[start : start + LENGTHS[i]] for t in tensors]
        for i, start in zip(members, layout.query_starts, strict=True)
    }


def attend(case, members, **placement):
    """{sequence: (o, lse)} of one packed call."""
    q, k, v, _, layout = packed(case, members, **placement)
    return by_sequence(members, layout, attention_varlen(q, k, v, layout, **case.options))


def gradients(case, members, **placement):
    """{sequence: (dq, dk, dv)} of one packed call."""
    q, k, v, do, layout = packed(case, members, **placement)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attention_varlen(*leaves, layout, **case.options)[0].backward(do)
    return by_sequence(members, layout, [leaf.grad for leaf in leaves])


@cache
def among(case):
    """{sequence: (o, lse)} of all sequences in one call."""
    return attend(case, range(len(LENGTHS)))


@cache
def cached_keys(case, block_size=BLOCK, extra_blocks=3):
    """The long sequence's keys and values in scattered blocks, NaN elsewhere, and the table."""
    blocks = -(-LONG // block_size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(blocks + extra_blocks, generator=generator)[:blocks]
    positions = torch.arange(LONG)
    slots = table[positions // block_size] * block_size + positions % block_size
    caches = []
    for part in sequence(case, 0)[1:3]:
        cache_ = part.new_full(
            (blocks + extra_blocks, block_size, case.kv_heads, case.dim), torch.nan
        )
        cache_.view(-1, case.kv_heads, case.dim)[slots.to(DEVICE)] = part
        caches.append(cache_)
    return *caches, table.tolist()


def paged_layout(spans, key_cache, value_cache, table):
    lens = [end - start for start, end in spans]
    return PagedAttention(
        query_starts=[sum(lens[:i]) for i in range(len(lens))],
        query_lens=lens,
        context_lens=[end for _, end in spans],
        block_tables=[table] * len(spans),
        slot_mapping=torch.zeros(sum(lens), dtype=torch.int64, device=DEVICE),
        key_cache=[key_cache],
        value_cache=[value_cache],
        block_size=key_cache.shape[1],
    )


def paged(case, spans, keys=None, **choice):
    """(o, lse) of queries start .. end of the long sequence, all spans in one call."""
    layout = paged_layout(spans, *(keys or cached_keys(case)))
    q = torch.cat([sequence(case, 0)[0][start:end] for start, end in spans])
    if not choice:
        return attention_paged(q, layout, 0, **case.options)
    k, v = (c[0].view(-1, case.kv_heads, case.dim) for c in (layout.key_cache, layout.value_cache))
    o, lse = attention_fwd(q, k, v, layout, *case.options.values(), **choice)
    return o, lse.float()


def decoded(case, **choice):
    """(o, lse) at the edges, every position a sequence of its own."""
    return paged(case, [(p, p + 1) for p in EDGES], **choice)


def at_edges(tensors):
    return [t[list(EDGES)] for t in tensors]


ENDS = (0, 1, 128, 129, 255, 1000, 2049, LONG)
CHUNKS = list(itertools.pairwise(ENDS))
SPREADS = (1, 7, 32)
"""Over how many programs the keys of a tile of few rows are spread."""


def decoded_alone(case):
    return [partial(paged, case, [(p, p + 1)]) for p in EDGES]


@pytest.fixture(scope="module", params=CASES, ids=name)
def case(request):
    """Each case, all its kernels compiled side by side."""
    found = request.param
    calls = [partial(gradients, found, [4]), partial(attend, found, [4]), partial(decoded, found)]
    calls += [partial(decoded, found, programs_per_tile=n) for n in SPREADS]
    together([*calls, *decoded_alone(found), *(partial(paged, found, [c]) for c in CHUNKS)])
    return found


def test_compiling_ahead_launches_nothing_and_what_it_compiled_is_found():
    case = Case(BF16, 80, 77)
    run, launched = partial(attend, case, [0]), []
    with patch.object(CompiledKernel, "launch_metadata", lambda *_: launched.append(1)):
        compile_ahead([run])
    assert not launched
    before = sum(len(c[0]) for c in attention_triton.attention_fwd_kernel.device_caches.values())
    run()
    after = sum(len(c[0]) for c in attention_triton.attention_fwd_kernel.device_caches.values())
    assert after == before


def test_matches_fp64(case):
    for i, (o, _) in among(case).items():
        exact = attention_reference(*sequence(case, i)[:3], **case.options)
        assert_within(o, exact, "attention", case.dtype)


def test_lse_is_the_log_normalizer_of_the_scores(case):
    q, k, _, _ = (t.double() for t in sequence(case, 3))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) * case.dim**-0.5
    row = torch.arange(len(q), device=DEVICE)
    distance = row[:, None] - row
    hidden = (distance < 0) | (distance >= (case.window or LONG))
    exact = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
    assert_within(among(case)[3][1], exact, "attention", FP32)


def test_gradients_match_fp64(case):
    for i, ours in gradients(case, [1, 2, 3]).items():
        q, k, v, do = (t.double() for t in sequence(case, i))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        attention_reference(*leaves, **case.options).backward(do)
        for got, leaf in zip(ours, leaves, strict=True):
            # A lone token's dq and dk are zero but for rounding, hence the floor on the norm.
            error = (got.double() - leaf.grad).norm() / leaf.grad.norm().clamp(min=1e-2)
            assert error < (1e-4 if case.dtype == FP32 else 5e-2)


def test_a_sequence_does_not_depend_on_its_neighbours(case):
    whole = among(case)
    for placement in ({}, {"gap": 48, "junk": 3.0}, {"gap": 16, "junk": torch.nan}):
        for members in ([0], [2], [3, 4, 1, 0, 2], [4, 3]):
            for i, rows in attend(case, members, **placement).items():
                assert all_same(rows, whole[i]), (i, members, placement)


def test_decode_gives_the_bytes_of_packed_prefill(case):
    expected = at_edges(among(case)[0])
    assert all_same(decoded(case), expected)
    for n in SPREADS:
        assert all_same(decoded(case, programs_per_tile=n), expected), n
    alone = [call() for call in decoded_alone(case)]
    assert all_same([torch.cat(part) for part in zip(*alone, strict=True)], expected)


def test_chunked_prefill_gives_the_bytes_of_packed_prefill(case):
    expected = among(case)[0]
    parts = [paged(case, [chunk]) for chunk in CHUNKS]
    assert all_same([torch.cat(part) for part in zip(*parts, strict=True)], expected)
    assert all_same(paged(case, CHUNKS), expected)


def test_a_gradient_does_not_depend_on_its_neighbours(case):
    whole = gradients(case, range(len(LENGTHS)))
    for members in ([0], [1], [2], [3, 4, 1, 0, 2], [4, 3]):
        for placement in ({}, {"gap": 48, "junk": 3.0}):
            for i, rows in gradients(case, members, **placement).items():
                assert all_same(rows, whole[i]), (i, members, placement)


def test_a_repeated_call_gives_the_same_bytes(case):
    members = range(len(LENGTHS))
    first, dfirst = attend(case, members), gradients(case, members)
    for _ in range(5):
        again, dagain = attend(case, members), gradients(case, members)
        assert all(all_same(again[i], first[i]) for i in members)
        assert all(all_same(dagain[i], dfirst[i]) for i in members)


SCHEDULE_CASES = (MAIN, Case(BF16, 64, 100), Case(FP32, 32), Case(FP16, 80), Case(BF16, 256))


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


@pytest.mark.parametrize("case", SCHEDULE_CASES[:3], ids=name)
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


@pytest.mark.parametrize("case", SCHEDULE_CASES[:3], ids=name)
def test_every_backward_schedule_gives_the_same_bytes(case):
    q, k, v, do, layout = packed(case, range(len(LENGTHS)))
    o, lse = attention_fwd(q, k, v, layout, *case.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *case.options.values())
    by_query, by_key = (backward_entries(t, q.dtype) for t in (BACKWARD_QUERIES, BACKWARD_KEYS))
    by_key = [s for s in by_key if admits(s, layout, do, q, k, v)]
    calls = [partial(call, query_schedule=s) for s in by_query]
    assert_same_bytes_where_they_fit(calls + [partial(call, key_schedule=s) for s in by_key])


def assert_five_products_give_the_bytes_of_two_kernels(case, lengths):
    """Keys that wait for one another against two kernels that wait for nothing."""
    starts = [sum(lengths[:i]) + 16 * i for i in range(len(lengths))]
    q, k, v, do = drawn(case, starts[-1] + lengths[-1] + 16, 0)
    layout = PackedSequences.of(starts, lengths)
    if not admits(FIVE_PRODUCTS, layout, do, q, k, v):
        pytest.skip("needs sm_90")
    o, lse = attention_fwd(q, k, v, layout, *case.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *case.options.values())
    two_kernels = call(query_schedule=BACKWARD_QUERIES[0])
    for _ in range(5):
        assert all_same(call(key_schedule=FIVE_PRODUCTS), two_kernels)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("dtype, heads, kv_heads", [(BF16, 8, 2), (FP16, 4, 4), (BF16, 3, 1)])
def test_chains_of_dq_handed_on_give_the_same_bytes(dim, window, dtype, heads, kv_heads):
    """Every length around the borders of a tile, so short that most programs are the first and the
    last."""
    assert_five_products_give_the_bytes_of_two_kernels(
        Case(dtype, dim, window, heads, kv_heads),
        [1, 63, 64, 65, 127, 0, 128, 129, 191, 192, 193, 1000, 16, 2300],
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
    ],
    ids=str,
)
def test_long_chains_of_dq_handed_on_give_the_same_bytes(case, lengths):
    """More programs of a sequence than run at a time, and groups of one to eight heads."""
    assert_five_products_give_the_bytes_of_two_kernels(case, lengths)


def test_a_captured_backward_pass_gives_the_eager_bytes():
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


def test_five_products_are_refused_where_they_cannot_run():
    for case in (Case(FP32, 64), Case(BF16, 96)):
        q, k, v, do, layout = packed(case, [2])
        o, lse = attention_fwd(q, k, v, layout, *case.options.values())
        with pytest.raises(ValueError, match="specialised warps need sm_90"):
            attention_bwd(
                do, q, k, v, o, lse, layout, *case.options.values(), key_schedule=FIVE_PRODUCTS
            )


def test_a_sum_of_dq_that_would_not_fit_is_made_by_two_kernels(monkeypatch):
    q, k, v, do, layout = packed(MAIN, [0, 1])
    o, lse = attention_fwd(q, k, v, layout, *MAIN.options.values())
    call = partial(attention_bwd, do, q, k, v, o, lse, layout, *MAIN.options.values())
    expected = call()
    monkeypatch.setattr(attention_schedules, "CHAIN_BYTES", 1 << 10)
    assert not in_five_products(layout, do, q, k, v)
    assert all_same(call(), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(dtype):
    expected = [attend(MAIN, [0])[0], gradients(MAIN, [0])[0], decoded(MAIN, programs_per_tile=7)]
    torch.set_default_dtype(dtype)
    try:
        found = [attend(MAIN, [0])[0], gradients(MAIN, [0])[0], decoded(MAIN, programs_per_tile=7)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(all_same, found, expected))


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (20, 1)])
def test_any_number_of_heads_can_share_keys(heads, kv_heads):
    """A group of 3 does not divide a tile; one of 20 is more than the smallest tile holds."""
    case = Case(BF16, 64, heads=heads, kv_heads=kv_heads)
    whole, edges, spread, alone, among_others = together(
        [
            partial(attend, case, [0, 3]),
            partial(decoded, case, programs_per_tile=1),
            partial(decoded, case, programs_per_tile=7),
            partial(gradients, case, [3]),
            partial(gradients, case, [2, 3]),
        ]
    )
    assert all_same(edges, at_edges(whole[0])) and all_same(spread, edges)
    assert all_same(attend(case, [3])[3], whole[3])
    assert all_same(alone[3], among_others[3])
    exact = attention_reference(*sequence(case, 3)[:3], **case.options)
    assert_within(whole[3][0], exact, "attention", BF16)


@pytest.mark.parametrize("block_size", [7, 64])
def test_the_cache_block_size_does_not_matter(block_size):
    keys = cached_keys(MAIN, block_size)
    expected = at_edges(among(MAIN)[0])
    calls = [partial(decoded, MAIN, keys=keys, programs_per_tile=n) for n in (1, 7)]
    for found in together(calls):
        assert all_same(found, expected)
    assert all_same(paged(MAIN, [(129, 1000)], keys), [t[129:1000] for t in among(MAIN)[0]])


def test_a_nan_in_another_sequence_does_not_reach_this_one():
    """Forward only: backward expects finite neighbours. The cache of `paged` has NaN as well."""
    for case in (MAIN, WINDOWED, Case(BF16, 64)):
        for sick in (3, 4):
            q, k, v, _, layout = packed(case, range(len(LENGTHS)), gap=16, junk=torch.nan)
            start = layout.query_starts[sick]
            for whole in (q, k, v):
                whole[start : start + LENGTHS[sick]] = torch.nan
            found = attention_varlen(q, k, v, layout, **case.options)
            for i, rows in by_sequence(range(len(LENGTHS)), layout, found).items():
                assert i == sick or all_same(rows, among(case)[i])


def test_rows_of_no_sequence_are_zero_and_minus_infinity():
    q, k, v, _, layout = packed(MAIN, [2, 1], gap=16, junk=torch.nan)
    o, lse = attention_varlen(q, k, v, layout, **MAIN.options)
    outside = torch.ones(len(q), dtype=torch.bool)
    for start, n in zip(layout.query_starts, layout.query_lens, strict=True):
        outside[start : start + n] = False
    assert not o[outside].any() and o.isfinite().all()
    assert (lse[outside] == -torch.inf).all()
    do = torch.ones_like(o).masked_fill(outside.to(DEVICE)[:, None, None], 0.0)
    clean = [t.nan_to_num() for t in (q, k, v)]
    found = attention_bwd(do, *clean, o, lse, layout, *MAIN.options.values())
    assert not any(x[outside].any() for x in found)


def test_strides_do_not_matter():
    case = Case(BF16, 64)
    *operands, layout = packed(case, [3])
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in operands]
    dims_apart = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in operands]
    wider = [F.pad(t, (8, 3))[..., 8:-3] for t in operands]

    def results(q, k, v, do):
        o, lse = attention_fwd(q, k, v, layout, *case.options.values())
        return o, lse, *attention_bwd(do, q, k, v, o, lse, layout, *case.options.values())

    calls = [partial(results, *t) for t in (operands, heads_first, dims_apart, wider)]
    expected, *found = together(calls)
    for i, other in enumerate(found):
        assert all_same(other, expected), i


def test_layouts_without_queries_give_zeros():
    q, k, v, _ = sequence(MAIN, 2)
    for layout in (PackedSequences.of([], []), PackedSequences.of([0, 16], [0, 0])):
        leaf = q.clone().requires_grad_()
        o, lse = attention_varlen(leaf, k, v, layout, **MAIN.options)
        o.sum().backward()
        assert not o.any() and (lse == -torch.inf).all() and not leaf.grad.any()
    o, lse = attention_varlen(q[:0], k[:0], v[:0], PackedSequences.of([], []), **MAIN.options)
    assert o.shape == (0, 4, 128) and lse.shape == (0, 4)


def test_a_captured_decode_gives_the_eager_bytes():
    layout = paged_layout([(p, p + 1) for p in EDGES], *cached_keys(MAIN))
    expected = at_edges(among(MAIN)[0])
    q = sequence(MAIN, 0)[0][list(EDGES)]
    static = torch.zeros_like(q)
    attention_paged(static, layout, 0, **MAIN.options)  # tables are copied and kernels compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention_paged(static, layout, 0, **MAIN.options)
    static.copy_(q)
    for _ in range(3):
        for x in found:
            x.zero_()
        graph.replay()
        assert all_same(found, expected)


def test_a_layout_is_not_captured_before_its_first_call():
    layout = paged_layout([(LONG - 1, LONG)], *cached_keys(MAIN))
    with (
        pytest.raises(RuntimeError, match="run the call once, then capture it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layout.tickets(DEVICE, 8)


@pytest.mark.parametrize(
    "case, queries",
    [
        (Case(BF16, 128, heads=2), 1),
        (Case(BF16, 64, 300), 1),
        (Case(FP16, 128, 300, heads=8), 1),
        (Case(BF16, 64, heads=16), 1),
        (Case(BF16, 128, 1000), 4),
        (Case(BF16, 128, heads=16), 2),
        (Case(BF16, 64, heads=16), 3),
    ],
    ids=lambda x: x if isinstance(x, int) else f"{name(x)}-{x.heads}",
)
def test_whoever_folds_gives_the_bytes_of_packed_prefill(case, queries):
    """Few or many rows of a tile, one tile or several, one block of keys beside many: folded by
    2 to 16 programs that wait for all, or by the last one. The tickets are left as they were."""
    whole = attend(case, [0])[0]
    rings = [s for s in DECODE if s.ring and has_wgmma(DEVICE)]
    # Up to 16 programs of a tile are on the device at once, and 32 are not.
    choices = list(itertools.product(rings, (1, 2, 5, 16, 32)))
    for ends in ((queries, 100, 257, LONG), (33, 128, 129, 2048)):
        spans = [(end - queries, end) for end in ends]
        layout = paged_layout(spans, *cached_keys(case))
        expected = [torch.cat([t[start:end] for start, end in spans]) for t in whole]
        q = torch.cat([sequence(case, 0)[0][start:end] for start, end in spans])
        caches = layout.key_cache[0], layout.value_cache[0]
        k, v = (c.view(-1, case.kv_heads, case.dim) for c in caches)
        call = partial(attention_fwd, q, k, v, layout, *case.options.values())
        calls = [partial(call, schedule=s, programs_per_tile=n) for s, n in choices]
        # How many programs there are is compiled in only where they may fold slices.
        compile_ahead(run for (s, n), run in zip(choices, calls, strict=True) if s.spread or n <= 2)
        tiles = len(layout.tiles(DEVICE, case.heads // case.kv_heads, 16))
        for choice, run in zip(choices, calls, strict=True):
            for _ in range(3):
                assert all_same(run(), expected), (ends, choice)
            assert not layout.tickets(DEVICE, tiles * case.kv_heads).any(), (ends, choice)


@pytest.mark.parametrize("schedule, programs", [(SPREAD, 16), (SPREAD, 3), (LAST, 16), (DEEP, 1)])
def test_replayed_launches_of_any_lengths_give_the_bytes_of_packed_prefill(schedule, programs):
    """Sequences without a key, of one block and of many, one captured launch for all."""
    if not has_wgmma(DEVICE):
        pytest.skip("needs sm_90")
    rounds = [(LONG, 1, 0, 100), (0, LONG, 129, 128), (0, 0, 0, 0), (33, 2048, 5, LONG)]
    *caches, table = cached_keys(MAIN)
    count = len(rounds[0])
    starts, lens, contexts = torch.arange(3 * count, dtype=torch.int32, device=DEVICE).chunk(3)
    tables = torch.tensor([table] * count, dtype=torch.int32, device=DEVICE)
    layout = CapturedPagedAttention.of(
        SequenceTables(starts, lens, contexts, tables),
        queries=1,
        capacity=LONG,
        slot_mapping=torch.zeros(count, dtype=torch.int64, device=DEVICE),
        key_cache=caches[:1],
        value_cache=caches[1:],
        block_size=BLOCK,
    )
    whole, queries = attend(MAIN, [0])[0], sequence(MAIN, 0)[0]
    q = torch.zeros_like(queries[:count])
    k, v = (c.view(-1, MAIN.kv_heads, MAIN.dim) for c in caches)
    call = partial(
        attention_fwd,
        q, k, v, layout, *MAIN.options.values(), schedule=schedule, programs_per_tile=programs,
    )  # fmt: skip
    lens.zero_()
    contexts.zero_()
    call()  # tables are copied and kernels compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for _ in range(4)]
    for ends in rounds * 13:
        contexts.copy_(torch.tensor(ends, dtype=torch.int32))
        lens.copy_(contexts.clamp(max=1))
        owned = contexts.nonzero()[:, 0]
        last = contexts[owned].long() - 1
        q[owned] = queries[last]
        for x in itertools.chain(*found):
            x.fill_(torch.nan)
        graph.replay()
        for results in found:
            assert all_same([x[owned] for x in results], [x[last] for x in whole]), ends
    assert not layout.tickets(DEVICE, count * MAIN.kv_heads).any()


@pytest.mark.parametrize("case", [MAIN, Case(BF16, 80, 100)], ids=name)
def test_compiled_equals_eager(case):
    q, k, v, _, layout = packed(case, [3, 2])

    def doubled(q, k, v):
        o, lse = attention_varlen(q * 1, k, v, layout, **case.options)
        return o * 2, lse

    compiled = torch.compile(doubled, fullgraph=True)
    assert all_same(compiled(q, k, v), doubled(q, k, v))


@pytest.mark.parametrize("programs", [1, 7])
def test_a_cache_of_more_than_2_to_the_31_elements(programs):
    blocks = 2**31 // (BLOCK * MAIN.kv_heads * MAIN.dim) + 300
    small_keys, small_values, small_table = cached_keys(MAIN)
    spans = [(p, p + 1) for p in EDGES]
    first = blocks - len(small_keys)
    caches = []
    for small in (small_keys, small_values):
        cache_ = small.new_empty(blocks, *small.shape[1:])
        assert cache_.numel() > 2**31
        cache_[first:] = small
        caches.append(cache_)
    table = [first + block for block in small_table]
    found = paged(MAIN, spans, (*caches, table), programs_per_tile=programs)
    assert all_same(found, at_edges(among(MAIN)[0]))


def test_packed_rows_past_2_to_the_31_elements():
    case = Case(BF16, 128, kv_heads=4)
    parts = sequence(case, 3)
    start = 2**31 // (case.heads * case.dim) + 16
    wholes = [x.new_zeros(start + len(x), *x.shape[1:]) for x in parts]
    for whole, part in zip(wholes, parts, strict=True):
        whole[start:] = part
    q, k, v, do = wholes
    layout = PackedSequences.of([start], [LENGTHS[3]])
    o, lse = attention_fwd(q, k, v, layout, *case.options.values())
    assert all_same([o[start:], lse[start:]], attend(case, [3])[3])
    found = attention_bwd(do, q, k, v, o, lse, layout, *case.options.values())
    assert all_same([x[start:] for x in found], gradients(case, [3])[3])


def stock(q, k, v, scale):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    causal = len(q[0, 0]) > 1
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return o[0].transpose(0, 1)


# fp32 gradients are not: their probabilities come from a log-sum-exp rounded to fp32. The bench
# states the ratio of every dtype.
@pytest.mark.parametrize("case", [MAIN, Case(FP16, 64)], ids=name)
def test_is_as_accurate_as_stock(case):
    scale = case.dim**-0.5
    layout = PackedSequences.of([0], [512])
    sides = (
        lambda q, k, v: attention_reference(q.double(), k.double(), v.double(), scale=scale),
        lambda q, k, v: attention_varlen(q, k, v, layout, scale=scale)[0],
        partial(stock, scale=scale),
    )
    errors = torch.zeros(2, 4, dtype=torch.float64)
    for seed in range(8):
        *operands, do = drawn(case, 512, 100 * seed)
        results = []
        for op in sides:
            wide = torch.float64 if op is sides[0] else case.dtype
            leaves = [x.to(wide, copy=True).requires_grad_() for x in operands]
            o = op(*leaves)
            o.backward(do.to(o.dtype))
            results.append([o.detach().double(), *(leaf.grad.double() for leaf in leaves)])
        for side in (0, 1):
            for i, (got, wanted) in enumerate(zip(results[side + 1], results[0], strict=True)):
                size = wanted.square().mean(0).sqrt()
                errors[side, i] += ((got - wanted) / size).abs().mean().cpu()
    assert (errors[0] <= ERROR_GROWTH_LIMIT * errors[1]).all(), errors[0] / errors[1]


def test_bad_operands_are_refused():
    q, k, v, _, layout = packed(MAIN, [2])
    with pytest.raises(ValueError, match="k is on cpu but q is on cuda"):
        attention_varlen(q, k.cpu(), v, layout, **MAIN.options)
    with pytest.raises(ValueError, match="head_dim 24; allowed: multiples of 16 up to 256"):
        attention_varlen(q[..., :24], k[..., :24], v[..., :24], layout, **MAIN.options)
    with pytest.raises(TypeError, match="k is torch.float32 but q is torch.bfloat16"):
        attention_varlen(q, k.float(), v, layout, **MAIN.options)
    with (
        torch.autocast("cuda", torch.bfloat16),
        pytest.raises(ValueError, match="autocast is on for cuda"),
    ):
        attention_varlen(q, k, v, layout, **MAIN.options)
    for case in (Case(FP32, 128), Case(BF16, 96)):
        q, k, v, _, layout = packed(case, [2])
        with pytest.raises(ValueError, match="specialised warps need sm_90"):
            attention_fwd(q, k, v, layout, *case.options.values(), schedule=PREFILL[0])
    with pytest.raises(ValueError, match="specialised warps need sm_90"):
        paged(MAIN, [(0, 100)], schedule=PREFILL[0])
    with pytest.raises(ValueError, match="a ring of buffers needs sm_90, a paged cache"):
        attention_fwd(q, k, v, layout, *case.options.values(), schedule=DECODE[0])


def test_stock_attention_fails_the_same_check():
    """torch's attention of one query against the same query in the whole."""
    q, k, v, _ = sequence(MAIN, 0)
    whole = stock(q, k, v, MAIN.options["scale"])
    alone = [stock(q[p : p + 1], k[: p + 1], v[: p + 1], MAIN.options["scale"]) for p in EDGES]
    assert not same_bytes(torch.cat(alone), whole[list(EDGES)])


def test_another_key_block_at_decode_fails_the_same_check(monkeypatch):
    expected = at_edges(among(MAIN)[0])
    # The ring of buffers is made for one block of keys.
    schedule = next(s for s in DECODE if not s.ring)
    monkeypatch.setattr(attention_triton, "key_block", lambda head_dim: 64)
    assert not all_same(decoded(MAIN, schedule=schedule), expected)
    assert not all_same(decoded(MAIN, schedule=schedule, programs_per_tile=1), expected)


def test_keys_anchored_at_a_padded_column_fail_the_same_check():
    """Blocks counted from 8 columns before the sequence: the same keys fall into other blocks."""
    parts, pad = sequence(WINDOWED, 3)[:3], 8
    widened = [torch.cat([torch.zeros_like(x[:pad]), x]) for x in parts]
    layout = PackedSequences.of([0], [LENGTHS[3] + pad])
    # The window hides the padding from the queries that are compared.
    rows = slice(WINDOWED.window, None)
    anchored = attention_varlen(*widened, layout, **WINDOWED.options)[0][pad:][rows]
    plain = among(WINDOWED)[3][0][rows]
    assert_within(anchored, plain, "attention", BF16)
    assert not same_bytes(anchored, plain)
