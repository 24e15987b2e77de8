"""Bytes of the experts on a GPU: against `linear` of each expert, under every cut, in graphs."""

import itertools

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    SequenceTables,
)
from rl_consistency.kernels.experts import cuda
from rl_consistency.kernels.experts.fold_triton import describes_rows, fold_runs
from rl_consistency.kernels.experts.op import experts, experts_reference
from rl_consistency.kernels.experts.pairs_triton import expert_pairs_op
from rl_consistency.kernels.experts.products_triton import described, gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.rows_triton import combine_fwd, pair_bwd
from rl_consistency.kernels.experts.runs_triton import find_runs
from rl_consistency.kernels.experts.schedules import (
    COMBINE,
    PAIR,
    fold_candidates,
    product_candidates,
)
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu, glu_gradients
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.matmul.op import matmul_nn
from rl_consistency.kernels.router.op import route
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import judged, rows_alike, schedules_alike
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
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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
    ids, weights = route(x, router, TOP_K, normalize=True)
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


def found(ids, layout, count=EXPERTS):
    numbers = layout.tables(ids.device)
    return expert_pairs_op(ids, numbers.query_start, numbers.tokens, count)


def by_expert(pairs, first, top_k=TOP_K):
    """(expert, its places, their rows, their pairs)."""
    edges = first.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(edges)):
        own = pairs[begin:end].long()
        yield expert, slice(begin, end), own // top_k, own


CHOICES = ("own", "alike", "even", "edges")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_product_schedule_gives_the_bytes_of_linear(dtype, choice):
    x, ids, _, gate_up, down, layout = case(dtype, choice)
    pairs, _, first = found(ids, layout)
    count = int(first[-1])
    pairs[count:] = 0  # read below as rows
    activated = probe((len(pairs), WIDTH), dtype, seed=5, scale=0.1).to(DEVICE)
    up = torch.empty(count, 2 * WIDTH, dtype=dtype, device=DEVICE)
    out, u = up.new_empty(count, HIDDEN), up.new_empty(count, WIDTH)
    for expert, places, rows, _ in by_expert(pairs, first):
        up[places] = linear(x[rows], gate_up[expert])
        out[places] = linear(activated[places], down[expert])
        u[places] = matmul_nn(x[rows], down[expert], out_dtype=dtype)
    turned = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    for schedule in product_candidates("nt", dtype, tma=described(down, "nt")):
        for weights in (gate_up, turned) if schedule.kind == "pointer" else (gate_up,):
            c = product_fwd(x, weights, "nt", first, pairs, TOP_K, True, schedule)
            assert same_bytes(c[:count], up), schedule
        c = product_fwd(activated, down, "nt", first, pairs, TOP_K, False, schedule)
        assert same_bytes(c[:count], out), schedule
        c = product_fwd(x, down, "nn", first, pairs, TOP_K, True, schedule)
        assert same_bytes(c[:count], u), schedule
        c = product_fwd(x[pairs.long() // TOP_K], down, "nn", first, pairs, TOP_K, False, schedule)
        assert same_bytes(c[:count], u), schedule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_gate_up_schedule_gives_the_bytes_of_linear_and_glu(dtype, choice):
    x, ids, _, gate_up, _, layout = case(dtype, choice)
    pairs, _, first = found(ids, layout)
    count = int(first[-1])
    expected = torch.empty(count, 2 * WIDTH, dtype=dtype, device=DEVICE)
    for expert, places, rows, _ in by_expert(pairs, first):
        expected[places] = linear(x[rows], gate_up[expert])
    gate, up = (part.contiguous() for part in expected.chunk(2, dim=-1))
    for activation in ACTIVATIONS:
        activated = glu(gate, up, activation)
        for schedule in product_candidates("gate_up", dtype, tma=described(gate_up, "nt")):
            for packed in (True, False):
                y, both = gate_up_fwd(x, gate_up, first, pairs, TOP_K, activation, packed, schedule)
                assert same_bytes(y[:count], activated), schedule
                assert not packed or same_bytes(both[:count], expected), schedule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_fold_schedule_gives_the_bytes_of_the_fold_of_each_expert(dtype, choice):
    x, ids, *_, layout = case(dtype, choice)
    pairs, places, first = found(ids, layout)
    runs = find_runs(ids, places, layout, EXPERTS)
    of_pairs = probe((len(pairs), WIDTH), dtype, seed=5).to(DEVICE)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    before = probe((EXPERTS, HIDDEN, WIDTH), seed=6).to(DEVICE, wide)
    sequence = torch.full((ROWS,), -1, device=DEVICE)
    for number, (start, length) in enumerate(zip(*SPANS, strict=True)):
        sequence[start : start + length] = number
    for fresh in (True, False):
        expected = torch.zeros_like(before) if fresh else before.clone()
        for expert, own, rows, _ in by_expert(pairs, first):
            for number in range(3):
                run = sequence[rows] == number
                if run.any():
                    fold_outer(expected[expert], x[rows[run]], of_pairs[own][run])
        tma = describes_rows(DEVICE, dtype, HIDDEN, WIDTH)
        for schedule in fold_candidates(dtype, tma=tma):
            buffer = torch.full_like(before, torch.nan) if fresh else before.clone()
            fold_runs(
                buffer, x, of_pairs, runs, dy_by_row=True, fresh=fresh,
                schedule=schedule,
            )  # fmt: skip
            assert same_bytes(buffer, expected), schedule
            turned = buffer.transpose(1, 2).contiguous()
            turned = (
                torch.full_like(turned, torch.nan)
                if fresh
                else (before.transpose(1, 2).contiguous())
            )
            fold_runs(
                turned, of_pairs, x, runs, dy_by_row=False, fresh=fresh,
                schedule=schedule,
            )  # fmt: skip
            assert same_bytes(turned.transpose(1, 2).contiguous(), expected), schedule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_row_schedule_gives_the_bytes_of_the_ops_it_stands_for(dtype, activation):
    _, ids, weights, *_, layout = case(dtype)
    pairs, places, first = found(ids, layout)
    count = int(first[-1])
    outputs = probe((len(pairs), HIDDEN), dtype, seed=2).to(DEVICE)
    for given in (weights, None):
        parts = outputs[places.clamp(min=0).long()].float()
        parts = parts if given is None else given[..., None] * parts
        total = parts[:, 0]
        for slot in range(1, TOP_K):
            total = total + parts[:, slot]
        expected = torch.where(places[:, :1] < 0, 0.0, total).to(dtype)
        law = judged(
            schedules_alike, "sum", COMBINE, lambda s, g=given: combine_fwd(outputs, places, g, s)
        )
        assert law.passed, law.detail
        assert same_bytes(combine_fwd(outputs, places, given), expected)
    packed = probe((len(pairs), 2 * WIDTH), dtype, seed=3, scale=0.1).to(DEVICE)
    u = probe((len(pairs), WIDTH), dtype, seed=4, scale=0.1).to(DEVICE)
    own = weights.flatten()[pairs[:count].long()][:, None]
    gate, up = (part.contiguous() for part in packed[:count].chunk(2, dim=-1))
    activated = glu(gate, up, activation)
    dgate, dup = glu_gradients(own * u[:count].float(), gate, up, activation)
    dweights = (u[:count].double() * activated.double()).sum(-1)
    found_first = None
    for schedule in PAIR:
        dpacked, weighted, got = pair_bwd(packed, u, weights, first, pairs, activation, schedule)
        assert same_bytes(dpacked[:count], torch.cat([dgate, dup], dim=1))
        assert same_bytes(weighted[:count], (own * activated.float()).to(dtype))
        found_first = got if found_first is None else found_first
        assert same_bytes(got, found_first)
        assert_within(got.flatten()[pairs[:count].long()], dweights, "reduction", torch.float32)
        assert not got[places[:, 0] < 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype):
    x, ids, weights, gate_up, down, _ = case(dtype)

    def op(x, ids, weights):
        layout = PackedSequences.of([0], [len(x)])
        return experts(x, ids, weights, gate_up, down, layout, activation="silu")

    law = judged(rows_alike, "y", op, x, ids, weights, counts=(2, 16, 17, 65, 257))
    assert law.passed, law.detail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_and_gradients_match_fp64(dtype):
    generator = torch.Generator().manual_seed(0)
    x, ids, _, gate_up, down, _ = case(dtype)
    x, gate_up, down, dy = (
        (torch.randn(t.shape, generator=generator) * scale).to(DEVICE, dtype)
        for t, scale in ((x, 1.0), (gate_up, HIDDEN**-0.5), (down, WIDTH**-0.5), (x, 0.1))
    )
    weights = torch.rand(ids.shape, generator=generator).to(DEVICE)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    layout = PackedSequences.of([0], [ROWS])
    y = experts(x, ids, *leaves[1:], layout, activation="silu")
    expected = experts_reference(exact[0], ids, *exact[1:])
    assert_within(y, expected, "reduction", dtype)
    y.backward(dy)
    expected.backward(dy.double())
    for ours, reference in zip(leaves, exact, strict=True):
        assert_within(ours.grad, reference.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_no_cut_into_micro_batches_moves_a_bit(dtype, normalize):
    block = Block(dtype, DEVICE, normalize=normalize)
    whole = block.step(WHOLE)
    for groups in GROUPINGS:
        assert block.step(groups).equals(whole)
    assert block.step(WHOLE, gap=2, filler=100.0).equals(whole)


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


def test_rows_with_impossible_ids_give_nan_and_touch_no_others():
    x, ids, weights, gate_up, down, layout = case()
    with torch.no_grad():
        expected = experts(x, ids, weights, gate_up, down, layout, activation="silu")
        ids[5, 2], ids[151, 0], ids[152] = EXPERTS, -1, ids[152].flip(0)
        y = experts(x, ids, weights, gate_up, down, layout, activation="silu")
    bad = [5, 151, 152]
    assert y[bad].isnan().all()
    rest = [r for r in range(ROWS) if r not in bad]
    assert same_bytes(y[rest], expected[rest])


def test_no_rows_and_no_sequences():
    x, ids, weights, gate_up, down, _ = case()
    none = PackedSequences.of([], [])
    for rows in (0, ROWS):
        leaves = [t[:rows].clone().requires_grad_() for t in (x, weights)]
        parameters = [t.clone().requires_grad_() for t in (gate_up, down)]
        y = experts(leaves[0], ids[:rows], leaves[1], *parameters, none, activation="silu")
        assert y.shape == (rows, HIDDEN) and not y.any()
        y.sum().backward()
        assert not any(t.grad.any() for t in (*leaves, *parameters))


def test_sequences_that_share_rows_are_refused_before_a_gradient():
    x, ids, weights, gate_up, down, _ = case()
    layout = PackedSequences.of([0, 10], [12, 10])
    gate_up.requires_grad_()
    y = experts(x, ids, weights, gate_up, down, layout, activation="silu")
    with pytest.raises(ValueError, match="share rows"):
        y.sum().backward()


def test_runs_that_are_not_aligned_fail_the_same_check(monkeypatch):
    """Mutant: the whole call is one sequence, so that runs of several sequences share steps."""
    stock = find_runs

    def unaligned(expert_ids, places, layout, count):
        end = layout.num_rows
        assert layout.query_lens
        return stock(expert_ids, places, PackedSequences.of([0], [end]), count)

    block = Block(torch.bfloat16, DEVICE)
    lengths = (16, 48, 32, 64, 16, 80)  # no filler, which this mutant would route
    whole = block.step(WHOLE, lengths)
    monkeypatch.setattr(cuda, "find_runs", unaligned)
    mutant = block.step(WHOLE, lengths)
    assert not same_bytes(mutant.gradients[1], whole.gradients[1])
    assert not block.step(GROUPINGS[0], lengths).equals(mutant)
