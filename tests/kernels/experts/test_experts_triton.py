import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts import cpu, cuda
from rl_consistency.kernels.experts.fold_triton import (
    describes_rows,
    find_runs,
    fold_runs,
    most_steps,
    sequence_blocks,
)
from rl_consistency.kernels.experts.pairs_triton import (
    activate_pairs,
    expert_pairs_op,
    gather_rows,
)
from rl_consistency.kernels.experts.products_triton import (
    described,
    gate_up_fwd,
    product_fwd,
)
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.experts.schedules import (
    BLOCK_STEPS,
    COMBINE,
    GATE_UP_TMA,
    PRODUCTS_TMA,
    fold_candidates,
)
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within
from tests.kernels.experts.cases import TOP_K, everything, parameters

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

CPU = torch.device("cpu")
ROWS, EXPERTS, HIDDEN, WIDTH = 90, 6, 40, 24
SPANS = ([50, 3, 75], [17, 30, 15])
"""Sequences that begin at rows 50, 3 and 75; other rows are filler."""


def case(dtype=torch.bfloat16, skew=False):
    """x, ids, weights, gate_up, down and a layout."""
    router, gate_up, down = (
        w.detach() for w in parameters(dtype, experts=EXPERTS, hidden=HIDDEN, width=WIDTH)
    )
    x = probe((ROWS, HIDDEN), dtype, scale=0.25)
    ids, weights, _ = route_with_logits(x, router, TOP_K, normalize=True)
    if skew:
        ids = torch.arange(1, 1 + TOP_K, dtype=torch.int32).repeat(ROWS, 1)
    return x, ids, weights, gate_up, down, PackedSequences.of(*SPANS)


def found(ids, layout):
    numbers = layout.tables(ids.device)
    return expert_pairs_op(ids, numbers.query_start, numbers.tokens, EXPERTS)


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("rows", [ROWS, 40])
def test_pairs_stand_by_expert_then_by_row(skew, rows):
    _, ids, *_, layout = case(skew=skew)
    ids = ids[:rows]
    if rows < ROWS:
        layout = PackedSequences.of([20, 3], [17, 15])
    pairs, places, first = found(ids, layout)
    owned = {r for s, n in zip(layout.query_starts, layout.query_lens) for r in range(s, s + n)}
    expected = [
        [r * TOP_K + s for r in range(rows) for s in range(TOP_K) if ids[r, s] == e and r in owned]
        for e in range(EXPERTS)
    ]
    flat = [p for own in expected for p in own]
    assert pairs[: len(flat)].tolist() == flat
    assert first.diff().tolist() == [len(own) for own in expected] and first[0] == 0
    for row in range(rows):
        for slot in range(TOP_K):
            place = flat.index(row * TOP_K + slot) if row in owned else -1
            assert places[row, slot] == place


def test_rows_with_impossible_ids_have_no_pairs_and_give_nan():
    x, ids, weights, gate_up, down, layout = case()
    ids[5, 2], ids[51, 0] = EXPERTS, -1
    ids[52] = ids[52].flip(0)
    ids[0] = 99  # filler
    pairs, places, first = found(ids, layout)
    assert places[[5, 51, 52]].eq(-2).all() and places[0].eq(-1).all()
    assert int(first[-1]) == TOP_K * (sum(SPANS[1]) - 3)
    y, *_ = cuda.experts_fwd(x, ids, weights, gate_up, down, layout, "silu", False)
    assert y[[5, 51, 52]].isnan().all() and not y[0].any()
    assert int(y.isnan().any(dim=1).sum()) == 3
    assert len(pairs) == ROWS * TOP_K


@pytest.mark.parametrize("skew", [False, True])
def test_runs_start_steps_in_the_order_of_the_sequences(skew):
    _, ids, *_, layout = case(skew=skew)
    pairs, places, _ = found(ids, layout)
    runs = find_runs(ids, places, layout, EXPERTS)
    routed = cpu.route_rows(ids, layout, EXPERTS)
    assert len(runs.places) == len(runs.rows) == most_steps(layout, TOP_K, EXPERTS)
    for expert, span in routed.by_expert():
        steps = slice(runs.first[expert], runs.first[expert + 1])
        got = runs.rows[steps].tolist()
        by_places = [-1 if p < 0 else int(pairs[p]) // TOP_K for p in runs.places[steps].tolist()]
        wanted = [-1 if i < 0 else int(routed.rows[i]) for i in routed.steps(span).tolist()]
        filler = [-1] * (-len(wanted) % BLOCK_STEPS)
        assert got == by_places == wanted + filler and len(wanted) % 16 == 0
    assert runs.places[runs.first[-1] :].eq(-1).all()
    assert runs.first.diff().gt(0).tolist() == [c > 0 for c in routed.counts]


def test_blocks_of_rows_hold_one_sequence_each_and_are_made_once():
    layout = PackedSequences.of([20, 0, 40, 50], [17, 16, 0, 3])
    blocks = sequence_blocks(layout, CPU, 16)
    assert blocks.rows.view(-1, 16)[:, 0].tolist() == [20, 36, 0, 50]
    assert blocks.rows.ge(0).sum() == 36
    assert blocks.sequence.tolist() == [0, 0, 1, 2] and blocks.first.tolist() == [0, 0, 2, 3]
    assert blocks.last.tolist() == [1, 2, 3]
    assert sequence_blocks(layout, CPU, 16) is blocks
    with pytest.raises(ValueError, match="share rows"):
        sequence_blocks(PackedSequences.of([0, 10], [12, 10]), CPU, 16)


@pytest.mark.parametrize(
    "dtype, skew",
    [
        (torch.bfloat16, True),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((torch.float32, False), (torch.bfloat16, False), (torch.float16, True))
        ),
    ],
)
def test_the_whole_op_matches_a_cpu(dtype, skew):
    x, ids, weights, gate_up, down, layout = case(dtype, skew)
    dy = probe((ROWS, HIDDEN), dtype, seed=7, scale=0.1)

    def results(device):
        wide = torch.float64 if device is cuda and dtype == torch.float32 else torch.float32
        operands = x, ids, weights, gate_up, down, dy, layout
        return everything(device, *operands, fresh=(True, False), wide=wide)

    for ours, expected in zip(results(cuda), results(cpu), strict=True):
        assert_within(ours, expected, "reduction", dtype, gradient=True)


@pytest.mark.thorough
def test_operands_of_any_strides_give_the_same_bytes():
    *given, layout = case()
    dy = probe((ROWS, HIDDEN), torch.bfloat16, seed=7, scale=0.1)

    def results(*operands):
        return everything(cuda, *operands, layout)

    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (*given, dy)]
    spread = [t.repeat_interleave(2, dim=0)[::2] for t in (*given, dy)]
    expected = results(*given, dy)
    for operands in (strided, spread):
        assert all(map(same_bytes, results(*operands), expected))
    sums = results(*given, torch.ones(1, 1, dtype=torch.bfloat16).expand(ROWS, HIDDEN))
    assert all(t.isfinite().all() for t in sums)


@pytest.mark.parametrize("width", [HIDDEN, pytest.param(600, marks=pytest.mark.thorough)])
def test_operands_are_copied_in_the_order_of_the_runs(width):
    _, ids, *_, layout = case(skew=True)
    _, places, _ = found(ids, layout)
    runs = find_runs(ids, places, layout, EXPERTS)
    x = probe((ROWS, 2 * width), torch.bfloat16)[:, :width]
    count = int(runs.first[-1])
    for schedule in (None, *COMBINE):
        y = gather_rows(x, runs.rows, runs.first, 1, schedule)
        rows = runs.rows[:count].long()
        expected = torch.where(rows[:, None] < 0, 0.0, x[rows])
        assert same_bytes(y[:count], expected) and len(y) == len(runs.rows)


def test_a_descriptor_schedule_is_refused_where_rows_cannot_be_addressed():
    _, ids, *_, layout = case()
    _, places, _ = found(ids, layout)
    runs = find_runs(ids, places, layout, EXPERTS)
    assert not describes_rows(CPU, torch.bfloat16, HIDDEN)  # the interpreter has no descriptors
    dy, x = probe((ROWS, HIDDEN), torch.bfloat16), probe((len(places) * TOP_K, 20), torch.bfloat16)
    buffer = torch.zeros(EXPERTS, HIDDEN, 20)
    own = fold_candidates(torch.bfloat16, tma=True)[0]
    with pytest.raises(ValueError, match="whole 16 bytes"):
        fold_runs(buffer, dy, x, *runs, dy_by_row=True, fresh=True, schedule=own)


@pytest.mark.thorough
def test_gathered_and_activated_pairs_are_those_of_the_fused_product():
    x, ids, _, gate_up, _, layout = case()
    pairs, _, first = found(ids, layout)
    count = int(first[-1])
    for schedule in COMBINE:
        gathered = gather_rows(x, pairs, first, TOP_K, schedule)
        assert same_bytes(gathered[:count], x[pairs[:count].long() // TOP_K])
    for activation in ACTIVATIONS:
        y, both = gate_up_fwd(x, gate_up, first, pairs, TOP_K, activation, True)
        for schedule in COMBINE:
            activated = activate_pairs(both, first, activation, schedule)
            assert same_bytes(activated[:count], y[:count])


def test_a_schedule_by_descriptor_is_refused_for_weights_it_cannot_address():
    x, ids, _, gate_up, _, layout = case()
    pairs, _, first = found(ids, layout)
    assert not described(gate_up, "nt")  # the interpreter has no descriptors
    with pytest.raises(ValueError, match=r"tma-16x64x128-w4-s5 copies by descriptor, which needs"):
        product_fwd(x, gate_up, "nt", first, pairs, TOP_K, True, PRODUCTS_TMA[0])
    with pytest.raises(ValueError, match="Use a pointer schedule"):
        gate_up_fwd(x, gate_up, first, pairs, TOP_K, "silu", True, GATE_UP_TMA[0])


def test_no_rows_and_no_sequences():
    x, ids, weights, gate_up, down, _ = case()
    none = PackedSequences.of([], [])
    for rows in (0, ROWS):
        own = x[:rows], ids[:rows], weights[:rows]
        y, dx, dweights, *folds = everything(cuda, *own, gate_up, down, own[0], none)
        assert y.shape == dx.shape == (rows, HIDDEN) and dweights.shape == (rows, TOP_K)
        assert not y.any() and not (rows and (dx.any() or dweights.any()))
        assert same_bytes(folds[0], torch.zeros(gate_up.shape)) and not folds[1].any()
