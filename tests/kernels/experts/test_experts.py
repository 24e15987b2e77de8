import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    SequenceTables,
)
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.experts.cases import EXPERTS, HIDDEN, TOP_K, parameters

ROWS = 70


def operands(dtype=torch.float32, rows=ROWS, normalize=True):
    x = probe((rows, HIDDEN), dtype, scale=0.25)
    router, gate_up, down = (w.detach() for w in parameters(dtype))
    ids, weights, _ = route_with_logits(x, router, TOP_K, normalize=normalize)
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
            numbers, queries=2, capacity=16, block_size=16, key_cache=[], value_cache=[],
            slot_mapping=torch.zeros(12, dtype=torch.int64),
        )  # fmt: skip
        y = experts(x, ids, weights, *parameters, layout, activation="silu")
        owned = torch.arange(12) % 2 < (queries if tokens is None else tokens).repeat_interleave(2)
        assert same_bytes(y[owned], expected[owned]) and not y[~owned].any()


def test_bad_operands_are_refused():
    x, ids, weights, gate_up, down = operands()
    for error, match, *given in (
        (ValueError, "do not fit each other", ids, weights, gate_up, down[:, 1:]),
        (ValueError, "do not fit each other", ids, weights, gate_up[:, 1:], down),
        (ValueError, r"they are \[rows, hidden\]", ids, weights, gate_up[0], down),
        (TypeError, "ids are torch.int64", ids.long(), weights, gate_up, down),
        (TypeError, "weights torch.float16", ids, weights.half(), gate_up, down),
        (ValueError, "for 70 rows and 8 experts", ids[1:], weights[1:], gate_up, down),
        (ValueError, "ids must be ascending", ids.flip(1), weights, gate_up, down),
        (ValueError, "from 0 to 7", ids + 8, weights, gate_up, down),
        (TypeError, "down is torch.bfloat16", ids, weights, gate_up, down.bfloat16()),
    ):
        with pytest.raises(error, match=match):
            whole(x, *given)
    with pytest.raises(ValueError, match="activation 'relu'; allowed: silu"):
        whole(x, ids, weights, gate_up, down, activation="relu")
    with pytest.raises(ValueError, match="sequences up to row 71, x has 70"):
        experts(x, ids, weights, gate_up, down, PackedSequences.of([0], [71]), activation="silu")
