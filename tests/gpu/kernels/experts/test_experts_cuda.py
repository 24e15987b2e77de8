"""Bytes of the experts on a GPU: against `linear` of each expert, under every cut, in graphs."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    SequenceTables,
)
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import choose_fwd, route_with_logits
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.experts.cases import (
    EDGES,
    GROUPINGS,
    LENGTHS,
    WHOLE,
    Block,
    ids_of_counts,
    parameters,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS, EXPERTS, HIDDEN, WIDTH, TOP_K = 300, 16, 512, 392, 4
SPANS = ([150, 3, 275], [117, 130, 25])
"""Sequences that begin at rows 150, 3 and 275; other rows are filler."""


@pytest.fixture(autouse=True)
def settings():
    with numeric_settings():
        yield


def case(dtype=torch.bfloat16, choice="own"):
    """x, ids, weights, gate_up, down and a layout; ids by the router, all alike, one each, or by
    which experts have the rows of `EDGES`, and five others what is left."""
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH}
    router, gate_up, down = (w.detach() for w in parameters(dtype, DEVICE, **sizes))
    # The output goes with the square of x and must not overflow in fp16.
    x = probe((ROWS, HIDDEN), dtype, scale=0.01 if dtype == torch.float16 else 0.05).to(DEVICE)
    ids, weights, _ = route_with_logits(x, router, TOP_K, normalize=True)
    each = torch.arange(TOP_K, device=DEVICE)
    if choice == "alike":
        ids = (each + 3).expand(ROWS, TOP_K).to(torch.int32).contiguous()
    if choice == "even":
        ids = ((torch.arange(ROWS, device=DEVICE)[:, None] + each) % EXPERTS).sort(dim=-1).values
        ids = ids.to(torch.int32)
    if choice == "edges":
        owned = torch.cat([torch.arange(s, s + n) for s, n in zip(*SPANS, strict=True)]).to(DEVICE)
        left = len(owned) * TOP_K - sum(EDGES)
        others = EXPERTS - len(EDGES)
        counts = [*EDGES, *((left + i) // others for i in range(others))]
        ids = ids.clone()
        ids[owned] = ids_of_counts(counts, TOP_K).to(DEVICE)
    return x, ids, weights, gate_up, down, PackedSequences.of(*SPANS)


CHOICES = ("own", "alike", "even", "edges")


@pytest.mark.parametrize("lengths", [(1,) * 6, (15,) * 6, (16,) * 6, (17,) * 6, LENGTHS])
def test_sequences_around_a_step_are_cut_freely(lengths):
    block = Block(torch.bfloat16, DEVICE)
    whole = block.step(WHOLE, lengths)
    assert all(block.step(groups, lengths).equals(whole) for groups in GROUPINGS)


def test_wide_experts_and_long_sequences_are_cut_freely():
    """More experts than pairs of some runs, several blocks of a sequence."""
    block = Block(torch.bfloat16, DEVICE, top_k=8, experts=128, hidden=256, width=192)
    lengths = (700, 1, 129, 1024, 333, 64)
    whole = block.step(WHOLE, lengths)
    assert all(block.step(groups, lengths).equals(whole) for groups in GROUPINGS)


def test_a_captured_graph_follows_another_routing():
    x, ids, weights, gate_up, down, _ = case()
    layout = PackedSequences.of(range(64), [1] * 64)
    given = [t[:64].clone() for t in (x, ids, weights)]

    def call():
        return experts(*given, gate_up, down, layout, activation="silu")

    with torch.no_grad():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        for choice in CHOICES:
            x, ids, weights, *_ = case(choice=choice)
            for start in (0, 64, 200):
                for own, t in zip(given, (x, ids, weights), strict=True):
                    own.copy_(t[start : start + 64])
                graph.replay()
                assert same_bytes(y, call())


def test_a_captured_layout_follows_lengths_on_the_device():
    x, ids, weights, gate_up, down, _ = case()
    rows, queries = 48, 4
    lens = torch.full((rows // queries,), queries, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(0, rows, queries, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(len(lens), 4, dtype=torch.int32, device=DEVICE)
    numbers = SequenceTables(starts, lens, lens.clone(), table)
    layout = CapturedPagedAttention.of(
        numbers, queries=queries, capacity=64, key_cache=[], value_cache=[], block_size=16,
        slot_mapping=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    given = [t[:rows].contiguous() for t in (x, ids, weights)]
    whole = experts(*given, gate_up, down, PackedSequences.of([0], [rows]), activation="silu")
    with torch.no_grad():
        experts(*given, gate_up, down, layout, activation="silu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*given, gate_up, down, layout, activation="silu")
    for length in (4, 0, 1, 3):
        lens.fill_(length)
        graph.replay()
        owned = torch.arange(rows, device=DEVICE) % queries < length
        assert same_bytes(y[owned], whole[owned]) and not y[~owned].any()


def test_nothing_waits_for_the_host():
    block = Block(torch.bfloat16, DEVICE)
    layout = PackedSequences.of([0, 32], [17, 30])
    x, dy = probe((64, 64), torch.bfloat16).to(DEVICE), probe((64, 64), torch.bfloat16).to(DEVICE)
    for attempt in range(3):
        rows = x.clone().requires_grad_()
        torch.cuda.synchronize()
        if attempt == 2:  # compiled, and tables copied
            torch.cuda.set_sync_debug_mode("error")
        try:
            block(rows, layout).backward(dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_logit_that_is_not_finite_fails_its_row_alone():
    logits = probe((6, 128)).to(DEVICE)
    _, expected, _ = choose_fwd(logits, 8, True)
    for row, value in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        logits[row, 5] = value
    logits[5] = torch.nan
    ids, weights, _ = choose_fwd(logits, 8, True)
    assert weights[[1, 3, 4, 5]].isnan().all()
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert int(ids.min()) >= 0 and int(ids.max()) < 128
    assert same_bytes(weights[[0, 2]], expected[[0, 2]])
