"""Gradients under every regrouping of the sequences, and on the edges of routing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.experts.cases import GROUPINGS, LENGTHS, WHOLE, Block

DTYPES = (torch.float32, torch.bfloat16)


def all_at_one(ids):
    """Every row at the last experts."""
    last = torch.arange(8 - ids.shape[1], 8, dtype=torch.int32, device=ids.device)
    return last.expand_as(ids).contiguous()


def one_each(ids):
    """Row r at the experts from r on: no two neighbours share their first one."""
    rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
    taken = (rows + torch.arange(ids.shape[1], device=ids.device)) % 8
    return taken.sort(dim=-1).values.to(torch.int32)


def regrouped(block, lengths=LENGTHS, choose=None):
    """Whether every regrouping gives the bytes of one micro-batch."""
    whole = block.step(WHOLE, lengths, choose=choose)
    return all(block.step(groups, lengths, choose=choose).equals(whole) for groups in GROUPINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_no_cut_into_micro_batches_moves_a_bit(dtype, normalize):
    assert regrouped(Block(dtype, normalize=normalize))


@pytest.mark.parametrize(
    "lengths", [(1,) * 6, (15,) * 6, (16,) * 6, (17,) * 6, (1, 15, 16, 17, 2, 64)]
)
def test_sequences_around_a_step_are_cut_freely(lengths):
    assert regrouped(Block(torch.bfloat16), lengths)


@pytest.mark.parametrize("choose", [all_at_one, one_each])
def test_all_tokens_at_one_expert_or_spread_evenly_are_cut_freely(choose):
    assert regrouped(Block(torch.bfloat16), choose=choose)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gaps_and_other_places_move_no_bit(dtype):
    block = Block(dtype)
    whole = block.step(WHOLE)
    assert block.step(WHOLE, gap=2, filler=-7.0).gradients[1:] != []
    for options in ({"gap": 1}, {"gap": 3, "filler": 100.0}):
        assert block.step(WHOLE, **options).equals(whole)
        assert block.step(GROUPINGS[1], **options).equals(whole)
    # The router folds rows as they lie, the experts sequences in their order.
    other = block.step(WHOLE, backwards=True)
    assert all(map(same_bytes, other.outputs + other.dx, whole.outputs + whole.dx))
    assert all(map(same_bytes, other.gradients[1:], whole.gradients[1:]))


def test_the_order_of_sequences_is_the_order_of_the_fold():
    """A negative control: what the fold cannot give."""
    block = Block()
    shuffled = block.step([[5, 4, 3, 2, 1, 0]])
    whole = block.step(WHOLE)
    assert all(map(same_bytes, shuffled.outputs + shuffled.dx, whole.outputs + whole.dx))
    assert not same_bytes(shuffled.gradients[1], whole.gradients[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpointing_moves_no_bit(dtype):
    block = Block(dtype)
    (x, dy), *_ = block.sequences((33,))
    layout = PackedSequences.of([0], [33])

    def gradients(forward):
        for weight in block.weights:
            weight.grad = None
        rows = x.clone().requires_grad_()
        y = forward(rows)
        y.backward(dy)
        return [y.detach(), rows.grad, *(weight.grad for weight in block.weights)]

    plain = gradients(lambda rows: block(rows, layout))
    for reentrant in (False, True):
        again = gradients(
            lambda rows, r=reentrant: checkpoint(block, rows, layout, use_reentrant=r)
        )
        assert all(map(same_bytes, plain, again))


def test_experts_without_rows_get_zeros_and_keep_what_they_have():
    block = Block()
    first = block.step(WHOLE, choose=all_at_one)
    assert not first.gradients[1][:5].any() and not first.gradients[2][:5].any()
    assert first.gradients[1][5:].any()
    assert not torch.signbit(first.gradients[1][:5]).any()
    # A second pass without rows at some experts leaves theirs alone.
    kept = torch.full((8, 96, 64), -0.0)
    (x, dy), *_ = block.sequences((20,))
    layout = PackedSequences.of([0], [20])
    block.weights[1].grad = kept.clone()
    block(x, layout, all_at_one).backward(dy)
    assert same_bytes(block.weights[1].grad[:5], kept[:5])


def test_no_rows_and_no_sequences_give_zeros():
    block = Block()
    for rows, layout in ((0, PackedSequences.of([], [])), (20, PackedSequences.of([], []))):
        for weight in block.weights:
            weight.grad = None
        x = probe((rows or 1, 64))[:rows].requires_grad_()
        y = block(x, layout)
        assert y.shape == (rows, 64) and not y.any()
        y.sum().backward()
        assert not x.grad.any()
        assert not any(weight.grad.any() for weight in block.weights)


def test_frozen_parameters_and_inputs_get_no_gradient():
    block = Block()
    whole = block.step(WHOLE).gradients
    for index in range(3):
        block.weights[index].requires_grad_(False)
        for weight in block.weights:
            weight.grad = None
        sequences = block.sequences()
        for (x, dy), n in zip(sequences, LENGTHS, strict=True):
            block(x, PackedSequences.of([0], [n])).backward(dy)
        for other, weight in enumerate(block.weights):
            if other == index:
                assert weight.grad is None
            elif other:  # the router's steps would need filled sequences
                assert same_bytes(weight.grad, whole[other])
        block.weights[index].requires_grad_(True)


def test_sequences_that_share_rows_are_refused():
    block = Block()
    x = probe((20, 64))
    with pytest.raises(ValueError, match="sequences of the layout share rows"):
        block(x, PackedSequences.of([0, 10], [12, 10]))
