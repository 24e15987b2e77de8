"""Keys that sequences share, read once on a GPU: the bytes of each sequence on its own."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    PagedAttention,
    SequenceTables,
    SharedRun,
    SharedTables,
    shared_arrays,
)
from rl_consistency.kernels.attention.schedules import DECODE_DEEP as DEEP
from rl_consistency.kernels.attention.schedules import DECODE_LAST as LAST
from rl_consistency.kernels.attention.schedules import DECODE_SPREAD as SPREAD
from rl_consistency.kernels.attention.schedules import SHARED, SHARED_LOW, Cut
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from rl_consistency.kernels.core.device import has_wgmma
from rl_consistency.verify.checks.attention import SCORE_SCALE
from tests.gpu.kernels.attention.attention_cases import (
    BF16,
    BLOCK,
    DEVICE,
    FP16,
    Case,
    all_same,
    name,
)

pytestmark = pytest.mark.gpu

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


@pytest.fixture(autouse=True)
def hopper():
    if not has_wgmma(DEVICE):
        pytest.skip("needs sm_90")


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
        count = len(self.lens)
        return PagedAttention(
            query_starts=range(0, count * self.queries, self.queries),
            query_lens=[self.queries] * count,
            context_lens=self.lens,
            block_tables=self.tables,
            slot_mapping=torch.zeros(len(self.new), dtype=torch.int64, device=DEVICE),
            key_cache=[self.caches[0].view(-1, BLOCK, *self.caches[0].shape[1:])],
            value_cache=[self.caches[1].view(-1, BLOCK, *self.caches[1].shape[1:])],
            block_size=BLOCK,
            shared_runs=runs,
        )

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
        *({"schedule": LAST, "programs_per_tile": 1, "shared_schedule": s} for s in SHARED),
        {"schedule": LAST, "programs_per_tile": 3, "shared_schedule": SHARED_LOW},
        *({"schedule": LAST, "cut": cut} for cut in (Cut(40, 300), Cut(0, 229))),
    ]
    assert_same_bytes(Groups(case, GROUPS), choices)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: f"{name(c)}-{c.heads}")
def test_few_groups_whose_keys_programs_share_give_the_same_bytes(case):
    choices = [
        {},
        *({"schedule": SPREAD, "programs_per_tile": n} for n in (2, 4)),
        {"schedule": LAST, "programs_per_tile": 40, "shared_schedule": SHARED_LOW},
        *({"schedule": DEEP, "programs_per_tile": 1, "shared_schedule": s} for s in SHARED),
        *({"schedule": SPREAD, "cut": cut} for cut in (Cut(7, 60), Cut(0, 70))),
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
    plain = groups.layout()
    return CapturedPagedAttention.of(
        SequenceTables(*numbers, tables, SharedTables(runs, keys)),
        queries=groups.queries,
        capacity=min(capacity, width * BLOCK),
        slot_mapping=plain.slot_mapping,
        key_cache=plain.key_cache,
        value_cache=plain.value_cache,
        block_size=BLOCK,
    )


def fill(layout, groups, members, runs):
    """Sequences outside `members` have nothing to do."""
    numbers, count = layout.numbers, len(groups.lens)
    on = torch.tensor([i in members for i in range(count)], device=DEVICE)
    numbers.query_len.copy_(torch.where(on, groups.queries, 0))
    numbers.context_len.copy_(torch.where(on, torch.tensor(groups.lens, device=DEVICE), 0))
    rows, keys = shared_arrays(runs, len(numbers.shared.runs), count)
    numbers.shared.runs.copy_(torch.tensor(rows, dtype=torch.int32))
    numbers.shared.keys.copy_(torch.tensor(keys, dtype=torch.int32))


CAPTURED = [
    (CASES[0], 1, {}),
    (CASES[1], 1, {"schedule": LAST, "programs_per_tile": 1, "shared_schedule": SHARED[1]}),
    (CASES[2], 4, {"schedule": LAST, "programs_per_tile": 3, "shared_schedule": SHARED_LOW}),
    (CASES[2], 4, {"schedule": LAST, "cut": Cut(40, 300), "shared_schedule": SHARED_LOW}),
]


@pytest.mark.parametrize("case, queries, choice", CAPTURED, ids=lambda x: str(x)[:40])
def test_groups_that_change_between_replays_give_the_same_bytes(case, queries, choice):
    groups = Groups(case, GROUPS, queries)
    expected, count = groups.prefilled(), len(groups.lens)
    layout = captured(groups, 4096, len(groups.runs) + 2)
    call = groups.call(layout, **choice)
    fill(layout, groups, range(count), groups.runs)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for _ in range(3)]
    # A sequence ends: its group goes on with fewer keys, fewer members, or each on its own.
    shorter = [replace(run, keys=run.keys // 2) for run in groups.runs]
    smaller = [replace(run, count=run.count - 1) for run in groups.runs if run.count > 2]
    everyone, some = set(range(count)), {i for i in range(count) if i % 5}
    apart = [r for r in groups.runs if {*range(r.first, r.first + r.count)} <= some]
    rounds = [
        *((everyone, groups.runs), (everyone, []), (everyone, shorter), (everyone, smaller[::-1])),
        *(
            (some, apart),
            (set(), []),
            (everyone, groups.runs[3:5]),
            (some, []),
            (everyone, smaller),
        ),
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
    wrong = [replace(run, keys=run.keys + 128) for run in groups.runs]
    fill(layout, groups, range(count), wrong)
    assert not all_same(call(), expected)
