"""Cuts of decode on a GPU: whole tiles, divided ones and both in one launch, the same bytes."""

import itertools
from functools import partial

import pytest
import torch

from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import CapturedPagedAttention, SequenceTables
from rl_consistency.kernels.attention.schedules import (
    DECODE,
    DECODE_CROWDED,
    DECODE_DEEP,
    DECODE_LAST,
    DECODE_SPREAD,
    Cut,
)
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from rl_consistency.kernels.core.device import has_wgmma
from tests.gpu.kernels.attention.attention_cases import (
    BF16,
    BLOCK,
    DEVICE,
    FP16,
    LONG,
    MAIN,
    Case,
    all_same,
    attend,
    cached_keys,
    name,
    paged_layout,
    sequence,
)

pytestmark = pytest.mark.gpu
RINGS = [s for s in DECODE if s.ring]


@pytest.fixture(autouse=True)
def hopper():
    if not has_wgmma(DEVICE):
        pytest.skip("needs sm_90")


def cuts_of(tiles):
    """Every form: all whole, all divided, some of each, evenly dealt or not, up to 40 programs of a
    tile, and divided tiles of one program."""
    half = tiles // 2
    return [
        *(Cut.even(tiles, 1), Cut(0, tiles), Cut(0, 2 * tiles), Cut(0, 2 * tiles + half)),
        *(Cut(half, tiles + half), Cut(half, 5 * tiles + 1), Cut(tiles - 1, tiles + 39)),
        Cut(1, 4 * tiles),
        *(Cut.even(tiles, n) for n in (5, 16, 32)),  # 16 programs of a tile fold in slices, not 32
    ]


def long_call(case, spans):
    """(the call, its layout, number of tiles) of spans of the long sequence."""
    layout = paged_layout(spans, *cached_keys(case))
    q = torch.cat([sequence(case, 0)[0][start:end] for start, end in spans])
    caches = layout.key_cache[0], layout.value_cache[0]
    k, v = (c.view(-1, case.kv_heads, case.dim) for c in caches)
    tiles = len(layout.tiles(DEVICE, case.heads // case.kv_heads, 16)) * case.kv_heads
    return partial(attention_fwd, q, k, v, layout, *case.options.values()), layout, tiles


def packed_rows(case, spans):
    return [torch.cat([t[start:end] for start, end in spans]) for t in attend(case, [0])[0]]


@pytest.mark.parametrize(
    "case, queries",
    [
        (MAIN, 1),
        (Case(BF16, 64, 300), 1),
        (Case(FP16, 64, heads=14), 1),
        (Case(BF16, 128, 1000), 4),
        (Case(BF16, 128, heads=16), 3),
        (Case(BF16, 80, heads=6), 1),
        (Case(FP16, 96, 200, heads=14), 1),
        (Case(BF16, 256, 700), 1),
        (Case(FP16, 192, heads=12), 2),
    ],
    ids=lambda x: x if isinstance(x, int) else f"{name(x)}-{x.heads}",
)
def test_every_cut_gives_the_bytes_of_packed_prefill(case, queries):
    """Sequences of one block of keys beside long ones. The tickets are left as they were."""
    ends = (queries, 100, 128, 129, 257, 2048, 33, LONG)
    spans = [(end - queries, end) for end in ends]
    expected = packed_rows(case, spans)
    call, layout, tiles = long_call(case, spans)
    choices = list(itertools.product(RINGS, cuts_of(tiles)))
    calls = [partial(call, schedule=s, cut=cut) for s, cut in choices]
    compile_ahead(calls)
    for (schedule, cut), run in zip(choices, calls, strict=True):
        for _ in range(3):
            assert all_same(run(), expected), (schedule, cut)
        if cut.whole < tiles:
            assert not layout.tickets(DEVICE, tiles - cut.whole).any(), (schedule, cut)


@pytest.mark.parametrize("case", [MAIN, Case(BF16, 64, 300), Case(BF16, 80)], ids=name)
@pytest.mark.parametrize("count", [14, 28, 75, 150, 300])
def test_the_cut_of_the_rule_gives_the_bytes_of_packed_prefill(case, count):
    """From a tenth of the programs that a device holds to more than twice as many tiles."""
    spans = [(end - 1, end) for end in range(LONG - 7 * count, LONG, 7)]
    expected = packed_rows(case, spans)
    call, _, tiles = long_call(case, spans)
    calls = [call]
    calls += [
        partial(call, schedule=DECODE_LAST, cut=cut)
        for cut in (Cut.even(tiles, 1), Cut(tiles // 3, 2 * tiles + 1), Cut(0, 3 * tiles - 5))
    ]
    compile_ahead(calls)
    for run in calls:
        for _ in range(3):
            assert all_same(run(), expected), run.keywords


CAPTURED = [
    *((DECODE_SPREAD, Cut(0, 24)), (DECODE_SPREAD, Cut(0, 160)), (DECODE_SPREAD, Cut(0, 263))),
    *((DECODE_LAST, Cut(3, 40)), (DECODE_LAST, Cut(0, 21)), (DECODE_LAST, Cut(9, 50))),
    *((DECODE_DEEP, Cut(5, 33)), (DECODE_CROWDED, Cut(2, 29))),
]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("schedule, cut", CAPTURED, ids=lambda x: str(x)[-30:])
def test_replays_of_one_cut_for_any_lengths_give_the_bytes_of_packed_prefill(schedule, cut, window):
    """Sequences without a key, of one block and of many, one captured launch for all."""
    case = Case(BF16, 128, window)
    rounds = [
        *((LONG, 1, 0, 100, 700), (0, LONG, 129, 128, 127), (0, 0, 0, 0, 0)),
        *((33, 2048, 5, LONG, LONG - 1), (1, 1, 1, 1, 1), (0, 0, 0, 0, LONG)),
    ]
    *caches, table = cached_keys(case)
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
    whole, queries = attend(case, [0])[0], sequence(case, 0)[0]
    q = torch.zeros_like(queries[:count])
    k, v = (c.view(-1, case.kv_heads, case.dim) for c in caches)
    call = partial(
        attention_fwd, q, k, v, layout, *case.options.values(), schedule=schedule, cut=cut
    )
    lens.zero_()
    contexts.zero_()
    call()  # tables are copied and kernels compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for _ in range(4)]
    for ends in rounds * 8:
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
    assert not layout.tickets(DEVICE, count * case.kv_heads - cut.whole).any()
