"""Decode on a GPU: whole tiles, divided ones and both in one launch, and keys that sequences share,
read once: the bytes of packed prefill, and of each sequence on its own."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    SequenceTables,
    SharedRun,
    SharedTables,
    shared_arrays,
)
from rl_consistency.kernels.attention.schedules import (
    DECODE,
    DECODE_CROWDED,
    DECODE_DEEP,
    DECODE_LAST,
    DECODE_SPREAD,
    SHARED,
    SHARED_LOW,
    Cut,
)
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from rl_consistency.kernels.core.device import has_wgmma
from rl_consistency.verify.checks.attention import SCORE_SCALE
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
    of_cache,
    paged_layout,
    sequence,
)
from tests.kernels.attention.layouts import paged

pytestmark = pytest.mark.gpu
RINGS = [s for s in DECODE if s.ring]


@pytest.fixture(autouse=True)
def hopper():
    if not has_wgmma(DEVICE):
        pytest.skip("needs sm_90")


def recorded(call, times):
    """A graph of some calls, and their results. The first one copies tables and compiles."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, [call() for _ in range(times)]


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
    numbers = SequenceTables(starts, lens, contexts, tables)
    layout = CapturedPagedAttention.of(
        numbers, queries=1, capacity=LONG, **of_cache(count, *caches)
    )
    whole, queries = attend(case, [0])[0], sequence(case, 0)[0]
    q = torch.zeros_like(queries[:count])
    k, v = (c.view(-1, case.kv_heads, case.dim) for c in caches)
    call = partial(
        attention_fwd, q, k, v, layout, *case.options.values(), schedule=schedule, cut=cut
    )
    lens.zero_()
    contexts.zero_()
    graph, found = recorded(call, 4)
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


GROUPS = [
    *((1, 0), (2, 127), (3, 128), (1, 300), (4, 129), (5, 2048), (6, 255), (7, 300), (8, 2048)),
    *((8, 1024), (1, 2048), (2, 2048)),
]
"""Sequences of a group and tokens of their common prompt."""
NINE = [(9, 640), (1, 40)]
FEW = [(8, 1500), (1, 700)]

CASES = [
    *(Case(BF16, 128, heads=4), Case(BF16, 128, heads=12), Case(BF16, 64, heads=8)),
    *(Case(FP16, 128, heads=14), Case(FP16, 64, heads=2), Case(BF16, 64, heads=16)),
    *(Case(BF16, 128, heads=2), Case(FP16, 128, heads=8), Case(FP16, 64, heads=12)),
]
"""1, 2, 4, 6, 7 and 8 query heads to a KV head."""


class Groups:
    """Sequences that begin with the prompt of their group, in packed rows and in a paged cache.

    The cache is NaN wherever no sequence has a key.
    """

    def __init__(self, case, groups, queries=1, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.case, self.queries = case, queries
        self.lens, self.runs, prompts = [], [], []
        for size, prompt in groups:
            first = len(self.lens)
            for _ in range(size):
                own = int(torch.randint(queries, 400, (1,), generator=draw))
                self.lens.append(prompt + own)
                prompts.append((first, prompt))
            whole = prompt // BLOCK * BLOCK
            for part in range(0, size, 8):
                count = min(8, size - part)
                if count > 1 and whole:
                    self.runs.append(SharedRun(first + part, count, whole))
        starts = [sum(-(-n // 16) * 16 for n in self.lens[:i]) for i in range(len(self.lens))]
        sizes = (case.heads, SCORE_SCALE), (case.kv_heads, SCORE_SCALE), (case.kv_heads, 0.001)
        self.q, self.k, self.v = (
            probe((starts[-1] + self.lens[-1] + 16, heads, case.dim), case.dtype, seed=seed + j,
                  scale=scale, device=DEVICE)
            for j, (heads, scale) in enumerate(sizes)
        )  # fmt: skip
        self.packed = PackedSequences.of(starts, self.lens)
        for i, (first, prompt) in enumerate(prompts):
            for x in (self.k, self.v):
                x[starts[i] : starts[i] + prompt] = x[starts[first] : starts[first] + prompt]
        blocks = sum(-(-n // BLOCK) for n in self.lens)
        free = iter(torch.randperm(blocks, generator=draw).tolist())
        self.tables, slots, rows = [], [], []
        for i, (first, prompt) in enumerate(prompts):
            common = self.tables[first][: prompt // BLOCK] if i != first else []
            own = -(-self.lens[i] // BLOCK) - len(common)
            self.tables.append(common + [next(free) for _ in range(own)])
            for at in range(self.lens[i]):
                slots.append(self.tables[i][at // BLOCK] * BLOCK + at % BLOCK)
                rows.append(starts[i] + at)
        self.caches = []
        for x in (self.k, self.v):
            cache = x.new_full((blocks * BLOCK, case.kv_heads, case.dim), torch.nan)
            cache[torch.tensor(slots, device=DEVICE)] = x[torch.tensor(rows, device=DEVICE)]
            self.caches.append(cache)
        last = [range(s + n - queries, s + n) for s, n in zip(starts, self.lens, strict=True)]
        self.last = torch.tensor([row for span in last for row in span], device=DEVICE)
        self.new = self.q[self.last].contiguous()

    def layout(self, runs=()):
        cache = self.cache_fields()
        return paged(self.lens, self.queries, block_tables=self.tables, shared_runs=runs, **cache)

    def cache_fields(self):
        return of_cache(len(self.new), *(x.view(-1, BLOCK, *x.shape[1:]) for x in self.caches))

    def prefilled(self):
        """(o, lse) of the last queries from a call of whole packed sequences."""
        call = self.q, self.k, self.v, self.packed, *self.case.options.values()
        return [x[self.last] for x in attention_fwd(*call)]

    def call(self, layout, **choice):
        return partial(
            attention_fwd, self.new, *self.caches, layout, *self.case.options.values(), **choice
        )


def assert_same_bytes(groups, choices, times=2):
    expected = groups.prefilled()
    assert all_same(groups.call(groups.layout())(), expected)
    calls = [groups.call(groups.layout(groups.runs), **choice) for choice in choices]
    compile_ahead(calls)
    for choice, call in zip(choices, calls, strict=True):
        for _ in range(times):
            assert all_same(call(), expected), choice


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{name(c)}-{c.heads}")
def test_shared_keys_give_the_bytes_of_packed_prefill(case):
    choices = [
        {},
        *({"schedule": DECODE_LAST, "programs_per_tile": 1, "shared_schedule": s} for s in SHARED),
        {"schedule": DECODE_LAST, "programs_per_tile": 3, "shared_schedule": SHARED_LOW},
        *({"schedule": DECODE_LAST, "cut": cut} for cut in (Cut(40, 300), Cut(0, 229))),
    ]
    assert_same_bytes(Groups(case, GROUPS), choices)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: f"{name(c)}-{c.heads}")
def test_few_groups_whose_keys_programs_share_give_the_same_bytes(case):
    choices = [
        {},
        *({"schedule": DECODE_SPREAD, "programs_per_tile": n} for n in (2, 4)),
        {"schedule": DECODE_LAST, "programs_per_tile": 40, "shared_schedule": SHARED_LOW},
        *({"schedule": DECODE_DEEP, "programs_per_tile": 1, "shared_schedule": s} for s in SHARED),
        *({"schedule": DECODE_SPREAD, "cut": cut} for cut in (Cut(7, 60), Cut(0, 70))),
    ]
    for groups in (FEW, NINE):
        assert_same_bytes(Groups(case, groups), choices)


@pytest.mark.parametrize("case, queries", [(CASES[0], 4), (CASES[2], 8)], ids=str)
def test_several_queries_of_each_sequence_give_the_same_bytes(case, queries):
    assert_same_bytes(Groups(case, GROUPS, queries), [{}, {"shared_schedule": SHARED_LOW}])


def test_a_window_reads_its_keys_by_itself():
    assert_same_bytes(Groups(replace(CASES[0], window=300), FEW), [{}])


def captured(groups, capacity, room):
    """A captured layout for the groups' sequences, whose numbers are to be filled in."""
    count, width = len(groups.lens), max(map(len, groups.tables))
    numbers = torch.zeros(3, count, dtype=torch.int32, device=DEVICE)
    numbers[0] = torch.arange(count) * groups.queries
    tables = torch.zeros(count, width, dtype=torch.int32, device=DEVICE)
    for i, table in enumerate(groups.tables):
        tables[i, : len(table)] = torch.tensor(table)
    runs = torch.zeros(room, 3, dtype=torch.int32, device=DEVICE)
    keys = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    return CapturedPagedAttention.of(
        SequenceTables(*numbers, tables, SharedTables(runs, keys)), queries=groups.queries,
        capacity=min(capacity, width * BLOCK), **groups.cache_fields(),
    )  # fmt: skip


def fill(layout, groups, members, runs):
    """Sequences outside `members` have nothing to do."""
    numbers, count = layout.numbers, len(groups.lens)
    on = torch.tensor([i in members for i in range(count)], device=DEVICE)
    numbers.query_len.copy_(torch.where(on, groups.queries, 0))
    numbers.context_len.copy_(torch.where(on, torch.tensor(groups.lens, device=DEVICE), 0))
    rows, keys = shared_arrays(runs, len(numbers.shared.runs), count)
    numbers.shared.runs.copy_(torch.tensor(rows, dtype=torch.int32))
    numbers.shared.keys.copy_(torch.tensor(keys, dtype=torch.int32))


CAPTURED_GROUPS = [
    (CASES[0], 1, {}),
    (CASES[1], 1, {"schedule": DECODE_LAST, "programs_per_tile": 1, "shared_schedule": SHARED[1]}),
    (CASES[2], 4, {"schedule": DECODE_LAST, "programs_per_tile": 3, "shared_schedule": SHARED_LOW}),
    (CASES[2], 4, {"schedule": DECODE_LAST, "cut": Cut(40, 300), "shared_schedule": SHARED_LOW}),
]


@pytest.mark.parametrize("case, queries, choice", CAPTURED_GROUPS, ids=lambda x: str(x)[:40])
def test_groups_that_change_between_replays_give_the_same_bytes(case, queries, choice):
    groups = Groups(case, GROUPS, queries)
    expected, count = groups.prefilled(), len(groups.lens)
    layout = captured(groups, 4096, len(groups.runs) + 2)
    call = groups.call(layout, **choice)
    fill(layout, groups, range(count), groups.runs)
    graph, found = recorded(call, 3)
    # A sequence ends: its group goes on with fewer keys, fewer members, or each on its own.
    shorter = [run._replace(keys=run.keys // 2) for run in groups.runs]
    smaller = [run._replace(count=run.count - 1) for run in groups.runs if run.count > 2]
    everyone, some = set(range(count)), {i for i in range(count) if i % 5}
    apart = [r for r in groups.runs if {*range(r.first, r.first + r.count)} <= some]
    rounds = [
        *((everyone, groups.runs), (everyone, []), (everyone, shorter), (everyone, smaller[::-1])),
        *((some, apart), (set(), []), (everyone, groups.runs[3:5])),
        *((some, []), (everyone, smaller)),
    ]
    for members, runs in rounds * 3:
        fill(layout, groups, members, runs)
        owned = [i * queries + j for i in sorted(members) for j in range(queries)]
        for x in (x for results in found for x in results):
            x.fill_(torch.nan)
        graph.replay()
        for results in found:
            assert all_same([x[owned] for x in results], [x[owned] for x in expected]), runs


def test_one_block_too_many_fails_the_same_check():
    """Negative control."""
    groups = Groups(CASES[0], FEW)
    expected, count = groups.prefilled(), len(groups.lens)
    layout = captured(groups, 4096, 2)
    call = groups.call(layout)
    fill(layout, groups, range(count), groups.runs)
    assert all_same(call(), expected)
    wrong = [run._replace(keys=run.keys + 128) for run in groups.runs]
    fill(layout, groups, range(count), wrong)
    assert not all_same(call(), expected)
