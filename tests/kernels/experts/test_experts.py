import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    SequenceTables,
)
from rl_consistency.kernels.experts import cpu
from rl_consistency.kernels.experts.op import experts, experts_reference
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.router.op import route, route_reference
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT, assert_within
from rl_consistency.verify.laws import judged, rows_alike
from tests.kernels.experts.cases import EXPERTS, HIDDEN, TOP_K, WIDTH, Block, parameters

ROWS = 70
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(dtype=torch.float32, rows=ROWS, normalize=True):
    x = probe((rows, HIDDEN), dtype, scale=0.25)
    router, gate_up, down = (w.detach() for w in parameters(dtype))
    ids, weights = route(x, router, TOP_K, normalize=normalize)
    return x, ids, weights, gate_up, down


def whole(x, *rest, activation="silu"):
    """All rows are one sequence's."""
    layout = PackedSequences.of([0], [len(x)])
    return experts(x, *rest, layout, activation=activation)


def by_hand(x, ids, weights, gate_up, down, activation="silu"):
    """The order's text, row by row."""
    y = torch.zeros_like(x)
    for r in range(len(x)):
        total = None
        for e, w in zip(ids[r].tolist(), weights[r], strict=True):
            gate, up = linear(x[r : r + 1], gate_up[e]).chunk(2, dim=-1)
            out = linear(glu(gate, up, activation), down[e])[0]
            total = w * out.float() if total is None else total + w * out.float()
        y[r] = total.to(x.dtype)
    return y


def drawn(dtype):
    """Normal values: what several products in a row make of a probe is out of any tolerance."""
    generator = torch.Generator().manual_seed(0)
    x, ids, weights, gate_up, down = operands(dtype)
    x, gate_up, down = (
        (torch.randn(t.shape, generator=generator) * scale).to(dtype)
        for t, scale in ((x, 1.0), (gate_up, HIDDEN**-0.5), (down, WIDTH**-0.5))
    )
    weights = torch.rand(weights.shape, generator=generator)
    return x, ids, weights / weights.sum(-1, keepdim=True), gate_up, down


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_fp64(dtype, activation):
    given = drawn(dtype)
    expected = experts_reference(*given, activation)
    # Three roundings in fp16 are more than the contract of one product allows.
    judged_as = torch.bfloat16 if dtype == torch.float16 else dtype
    assert_within(whole(*given, activation=activation), expected, "reduction", judged_as)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_match_fp64(dtype):
    x, ids, weights, gate_up, down = drawn(dtype)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole(x, ids, *leaves[1:]).backward(dy)
    experts_reference(exact[0], ids, *exact[1:]).backward(dy.double())
    for ours, reference in zip(leaves, exact, strict=True):
        assert ours.grad.dtype == ours.dtype
        assert_within(ours.grad, reference.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_linear_added_by_ascending_id(dtype):
    given = operands(dtype)
    assert same_bytes(whole(*given), by_hand(*given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype):
    x, ids, weights, *parameters = operands(dtype)

    def op(x, ids, weights):
        return whole(x, ids, weights, *parameters)

    assert judged(rows_alike, "y", op, x, ids, weights).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_gradients_do_not_depend_on_the_batch(dtype):
    x, ids, weights, *parameters = operands(dtype)
    dy = probe((ROWS, HIDDEN), dtype, seed=9)

    def gradients(x, ids, weights, dy):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
        whole(leaves[0], ids, leaves[1], *parameters).backward(dy)
        return torch.cat([t.grad.float() for t in leaves], dim=1)

    assert judged(rows_alike, "dx and dweights", gradients, x, ids, weights, dy).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filler_reaches_no_expert_and_gives_zeros(dtype):
    x, ids, weights, *parameters = operands(dtype)
    expected = whole(x, ids, weights, *parameters)
    junk = torch.full((9, HIDDEN), torch.nan, dtype=dtype)
    none = torch.zeros(9, TOP_K, dtype=torch.int32)
    nan = torch.full((9, TOP_K), torch.nan)
    padded = experts(
        torch.cat([junk, x[:30], junk, x[30:], junk]),
        torch.cat([none, ids[:30], none, ids[30:], none]),
        torch.cat([nan, weights[:30], nan, weights[30:], nan]),
        *parameters,
        PackedSequences.of([9, 48], [30, 40]),
        activation="silu",
    )
    assert same_bytes(torch.cat([padded[9:39], padded[48:88]]), expected)
    for rows in (padded[:9], padded[39:48], padded[88:]):
        assert same_bytes(rows, torch.zeros(9, HIDDEN, dtype=dtype))


def test_a_row_of_nan_leaves_its_neighbours_alone():
    x, ids, weights, *parameters = operands()
    expected = whole(x, ids, weights, *parameters)
    weights[7] = torch.nan
    x[9, 3] = torch.inf
    y = whole(x, ids, weights, *parameters)
    assert y[7].isnan().all() and y[9].isnan().any()
    rest = [r for r in range(ROWS) if r not in (7, 9)]
    assert same_bytes(y[rest], expected[rest])


@pytest.mark.parametrize("choice", ["one", "last", "own"])
def test_rows_at_any_experts_are_those_of_linear(choice):
    x, ids, weights, *parameters = operands()
    given = {
        "one": torch.arange(TOP_K).expand(ROWS, TOP_K),
        "last": torch.arange(EXPERTS - TOP_K, EXPERTS).expand(ROWS, TOP_K),
        "own": (torch.arange(ROWS)[:, None] + torch.arange(TOP_K)) % EXPERTS,
    }[choice]
    ids = given.sort(dim=-1).values.to(torch.int32)
    assert same_bytes(whole(x, ids, weights, *parameters), by_hand(x, ids, weights, *parameters))


def test_rows_of_a_captured_layout_are_those_that_hold_tokens():
    x, ids, weights, *parameters = operands(rows=12)
    expected = whole(x, ids, weights, *parameters)
    queries = torch.tensor([2, 2, 1, 2, 0, 2], dtype=torch.int32)
    starts, table = torch.arange(0, 12, 2, dtype=torch.int32), torch.zeros(6, 1, dtype=torch.int32)
    for tokens in (None, torch.tensor([2, 1, 1, 0, 0, 2], dtype=torch.int32)):
        numbers = SequenceTables(starts, queries, queries, table, token_len=tokens)
        layout = CapturedPagedAttention.of(
            numbers,
            queries=2,
            capacity=16,
            slot_mapping=torch.zeros(12, dtype=torch.int64),
            key_cache=[],
            value_cache=[],
            block_size=16,
        )
        y = experts(x, ids, weights, *parameters, layout, activation="silu")
        owned = torch.arange(12) % 2 < (queries if tokens is None else tokens).repeat_interleave(2)
        assert same_bytes(y[owned], expected[owned]) and not y[~owned].any()


def test_non_contiguous_operands_give_the_same_bytes():
    given = operands()
    x, ids, weights, gate_up, down = given
    strided = [t.t().contiguous().t() for t in (x, ids, weights)]
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (gate_up, down)]
    assert same_bytes(whole(*strided, *turned), whole(*given))


def stock(kind, dtype, router, gate_up, down, top_k):
    """Transformers' block with the same weights."""
    experts, hidden, width = down.shape
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = kind
    block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    block.gate.weight = nn.Parameter(router.detach().clone())
    block.experts.gate_up_proj = nn.Parameter(gate_up.detach().clone())
    block.experts.down_proj = nn.Parameter(down.detach().clone())
    return block


def errors(dtype, kind, top_k=8):
    """Relative errors against fp64 of ours and stock's: y, dx and the three gradients."""
    torch.manual_seed(0)
    experts_, hidden, width, rows = 32, 128, 96, 256
    router = torch.randn(experts_, hidden).div(hidden**0.5).to(dtype)
    gate_up = torch.randn(experts_, 2 * width, hidden).div(hidden**0.5).to(dtype)
    down = torch.randn(experts_, hidden, width).div(width**0.5).to(dtype)
    x, dy = torch.randn(2, rows, hidden).to(dtype)
    layout = PackedSequences.of([0, 128], [128, 128])
    ids, _ = route(x, router, top_k, normalize=True)

    def ours(x, router, gate_up, down):
        chosen, weights = route(x, router, top_k, normalize=True)
        return experts(x, chosen, weights, gate_up, down, layout, activation="silu")

    def exact(x, router, gate_up, down):
        p = (x @ router.t()).softmax(-1)
        weights = p.gather(1, ids.long())
        weights = weights / weights.sum(-1, keepdim=True)
        return experts_reference(x, ids, weights, gate_up, down)

    def results(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves)
        y.backward(dy.to(y.dtype))
        return [y.detach(), *(t.grad for t in leaves)]

    given = (x, router, gate_up, down)
    block = stock(kind, dtype, router, gate_up, down, top_k)
    # Rows whose experts stock's rounded logits change are left out, of gradients too.
    same = (block.gate(x)[2].sort(dim=-1).values == ids).all(dim=-1)
    assert same.float().mean() > 0.5
    dy[~same] = 0
    reference = results(exact, *(t.double() for t in given))
    rows_of_stock = x.clone().requires_grad_()
    y = block(rows_of_stock[None])[0]
    y.backward(dy)
    weights = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    theirs = [y.detach(), rows_of_stock.grad, *(w.grad for w in weights)]

    def error(a, b, rowwise):
        kept = same if rowwise else slice(None)
        return ((a.double() - b)[kept].norm() / b[kept].norm()).item()

    return [
        (error(a, r, i < 2), error(b, r, i < 2))
        for i, (a, b, r) in enumerate(zip(results(ours, *given), theirs, reference, strict=True))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_errors_are_at_most_those_of_stock(dtype, kind):
    for ours, theirs in errors(dtype, kind):
        assert ours <= ERROR_GROWTH_LIMIT * theirs


def test_bad_operands_are_refused():
    x, ids, weights, gate_up, down = operands()
    with pytest.raises(ValueError, match="do not fit each other"):
        whole(x, ids, weights, gate_up, down[:, 1:])
    with pytest.raises(ValueError, match="do not fit each other"):
        whole(x, ids, weights, gate_up[:, 1:], down)
    with pytest.raises(ValueError, match=r"they are \[rows, hidden\]"):
        whole(x, ids, weights, gate_up[0], down)
    with pytest.raises(TypeError, match="ids are torch.int64"):
        whole(x, ids.long(), weights, gate_up, down)
    with pytest.raises(TypeError, match="weights torch.float16"):
        whole(x, ids, weights.half(), gate_up, down)
    with pytest.raises(ValueError, match=r"for 70 rows and 8 experts"):
        whole(x, ids[1:], weights[1:], gate_up, down)
    with pytest.raises(ValueError, match="ids must be ascending"):
        whole(x, ids.flip(1), weights, gate_up, down)
    with pytest.raises(ValueError, match="from 0 to 7"):
        whole(x, ids + 8, weights, gate_up, down)
    with pytest.raises(ValueError, match="activation 'relu'; allowed: silu"):
        whole(x, ids, weights, gate_up, down, activation="relu")
    with pytest.raises(TypeError, match="down is torch.bfloat16"):
        whole(x, ids, weights, gate_up, down.bfloat16())
    with pytest.raises(ValueError, match="sequences up to row 71, x has 70"):
        experts(x, ids, weights, gate_up, down, PackedSequences.of([0], [71]), activation="silu")


def ordered_combine(order):
    """A mutant of `cpu.combine`: a row's outputs added in another order."""

    def combine(outputs, routed, num_rows, weights=None):
        if weights is None:
            weights = torch.ones(num_rows, int(routed.slots.max()) + 1)
        parts = outputs.new_zeros(*weights.shape, outputs.shape[1]).float()
        weight = weights[routed.rows, routed.slots].unsqueeze(-1)
        parts[routed.rows, routed.slots] = weight * outputs.float()
        y = torch.zeros(len(weights), outputs.shape[1])
        for slots in order(weights).unbind(1):
            y = y + parts[torch.arange(len(weights)), slots]
        return y.to(outputs.dtype)

    return combine


def test_a_combine_in_rank_order_fails_the_same_check(monkeypatch):
    given = operands()
    expected = by_hand(*given)
    monkeypatch.setattr(cpu, "combine", ordered_combine(lambda w: torch.arange(TOP_K).expand_as(w)))
    assert same_bytes(whole(*given), expected)
    by_rank = ordered_combine(lambda w: w.argsort(dim=-1, descending=True))
    monkeypatch.setattr(cpu, "combine", by_rank)
    assert not same_bytes(whole(*given), expected)


def test_an_atomic_combine_fails_the_same_check(monkeypatch):
    """Mutant: outputs are added as they arrive."""
    x, ids, weights, *parameters = operands()
    generator = torch.Generator().manual_seed(0)
    arrival = ordered_combine(lambda w: torch.rand(w.shape, generator=generator).argsort(dim=-1))
    monkeypatch.setattr(cpu, "combine", arrival)

    def op(x, ids, weights):
        return whole(x, ids, weights, *parameters)

    assert judged(rows_alike, "y", op, x, ids, weights).mismatches > 0


def test_routed_filler_fails_the_same_check(monkeypatch):
    """Mutant: filler reaches experts."""
    stock_rows = cpu.route_rows

    def all_rows(expert_ids, layout, num_experts):
        rows = PackedSequences.of([0], [len(expert_ids)])
        return stock_rows(expert_ids, rows, num_experts)

    monkeypatch.setattr(cpu, "route_rows", all_rows)
    block = Block()
    x, _ = block.sequences((20,))[0]
    assert block(x, PackedSequences.of([0], [11]))[11:].any()
    with pytest.raises(AssertionError):
        block.step([[0]], (20,), gap=1)


def test_stock_rows_fail_the_same_check():
    router, gate_up, down = parameters(torch.float32)
    block = stock("eager", torch.float32, router, gate_up, down, TOP_K)
    x = probe((ROWS, HIDDEN), scale=0.25)
    with torch.no_grad():
        assert judged(rows_alike, "y", lambda rows: block(rows[None])[0], x).mismatches > 0


def test_the_reference_of_router_and_experts_fit_each_other():
    x, *_ = operands()
    router, gate_up, down = parameters(torch.float32)
    ids, weights = route_reference(x, router, TOP_K, normalize=True)
    assert_within(
        Block()(x, PackedSequences.of([0], [ROWS])).detach(),
        experts_reference(x, ids, weights, gate_up, down).detach(),
        "reduction",
        torch.float32,
    )
    assert down.shape[2] == WIDTH
