"""The load-balancing loss of each sequence: what it is, and that no cut moves a bit of it."""

import warnings

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.models import decoder
from rl_consistency.models.moe import balance
from rl_consistency.models.moe.balance import sequence_balance
from rl_consistency.models.moe.routing import Routed, RoutingRecord
from rl_consistency.models.packing import lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.digest import first_difference
from rl_consistency.parity.gradients import check_gradients
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.substitution import attribute

EXPERTS, TOP_K, LENGTHS = 6, 2, (5, 16, 1, 23)
SEQUENCES = probe_tokens((9, 33, 21, 16), 331)
PROMPTS = [3, 5, 2, 7]


def routed(lengths=LENGTHS, starts=(0, 16, 32, 48), rows=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    of_tokens = torch.randn(sum(lengths), EXPERTS, generator=generator) * 2
    logits = torch.full((rows, EXPERTS), 3.0)
    places = [s + i for s, n in zip(starts, lengths, strict=True) for i in range(n)]
    logits[places] = of_tokens
    ids = logits.topk(TOP_K).indices.sort(dim=1).values.to(torch.int32)
    return Routed(logits.requires_grad_(), ids), PackedSequences.of(list(starts), list(lengths))


def reference(layer, layout):
    """The formula in fp64, sequence by sequence."""
    found = []
    for start, n in zip(layout.query_starts, layout.query_lens, strict=True):
        p = layer.logits[start : start + n].double().softmax(dim=-1)
        ids = layer.expert_ids[start : start + n].long()
        f = torch.bincount(ids.flatten(), minlength=EXPERTS).double() * EXPERTS / (TOP_K * n)
        found.append((f * p.mean(dim=0)).sum())
    return torch.stack(found)


def test_values_and_gradients_are_those_of_the_formula():
    layer, layout = routed()
    found = sequence_balance(RoutingRecord(True, [layer, layer]), layout)
    weights = torch.tensor([0.5, -2.0, 1.0, 3.0])
    (ours,) = torch.autograd.grad((found * weights).sum(), layer.logits)
    (right,) = torch.autograd.grad((reference(layer, layout) * weights).sum(), layer.logits)
    assert torch.allclose(found, reference(layer, layout).float(), rtol=1e-6)
    assert torch.allclose(ours, right, rtol=1e-5, atol=1e-8)
    assert bool((ours[5:16] == 0).all())  # filler


@torch.no_grad()
def test_a_balanced_sequence_has_one_and_one_expert_alone_the_most():
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    layout = PackedSequences.of([0], [3])
    even = Routed(torch.zeros(3, EXPERTS), ids)
    assert sequence_balance(RoutingRecord(True, [even]), layout).tolist() == [1.0]
    one = Routed(torch.tensor([[90.0, 0, 0, 0, 0, 0]] * 3), torch.zeros(3, 1, dtype=torch.int32))
    assert sequence_balance(RoutingRecord(True, [one]), layout).tolist() == [6.0]


def test_one_sequence_has_what_transformers_computes_for_it_times_the_number_of_experts_it_meets():
    layer, layout = routed((23,), (0,), 23)
    stock = load_balancing_loss_func((layer.logits,), EXPERTS, TOP_K)
    ours = sequence_balance(RoutingRecord(True, [layer]), layout)
    assert torch.allclose(ours * TOP_K, stock.reshape(1), rtol=1e-5)


def test_a_logit_that_is_not_finite_gives_its_sequence_a_loss_of_nan():
    layer, layout = routed()
    with torch.no_grad():
        layer.logits[17, 2] = torch.nan
        layer.logits[7] = torch.nan  # filler
    found = sequence_balance(RoutingRecord(True, [layer]), layout)
    assert found.isnan().tolist() == [False, True, False, False]


def balances(model, groups, layout="packed"):
    """Loss of each sequence and gradients of all parameters, of the balance loss alone."""
    model.zero_grad()
    found = []
    for group in groups:
        inputs, mask = lay_out([SEQUENCES[i] for i in group], layout)
        scored = token_logprobs(
            model,
            inputs,
            attention_mask=mask,
            prompt_lengths=[PROMPTS[i] for i in group],
            balance=True,
        )
        (scored.balance * 0.01).sum().backward()
        found.append(scored.balance.detach())
    return {"": torch.cat(found)} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


CUTS = ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]])


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"])
def test_no_cut_and_no_layout_moves_a_bit(name):
    with patch(model := build_preset(name, torch.bfloat16)):
        expected = balances(model, [[0, 1, 2, 3]])
        assert any(expected[n].any() for n in expected if n.endswith("gate.weight"))
        for groups in CUTS:
            assert first_difference(balances(model, groups), expected) is None
        for layout in ("packed_with_gaps", "left_padded", "right_padded"):
            assert first_difference(balances(model, [[0, 1, 2, 3]], layout), expected) is None


@pytest.mark.parametrize("first", ["balance", "logprobs"])
def test_a_backward_pass_of_its_own_is_a_second_one_of_the_same_forward(first):
    def scored():
        return token_logprobs(model, SEQUENCES, prompt_lengths=PROMPTS, balance=True)

    with patch(model := build_preset("tiny-qwen3-moe")):
        found = scored()
        parts = [found.balance.sum(), found.logprobs.sum()]
        if first == "logprobs":
            parts.reverse()
        parts[0].backward(retain_graph=True)
        with pytest.raises(ValueError, match="a second backward pass of one forward pass"):
            parts[1].backward()
        model.zero_grad()
        for _ in range(2):  # micro-batches
            found = scored()
            (found.balance.sum() + found.logprobs.sum()).backward()
        one, other = scored(), scored()
        with pytest.raises(ValueError, match="took part in several forward passes"):
            (one.balance.sum() + other.balance.sum()).backward()


def test_without_its_forward_pass_a_second_one_depends_on_the_cut(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(decoder, "record_forward", lambda *_: None)

    def gradient(groups):
        model.zero_grad()
        for group in groups:
            inputs, prompts = [SEQUENCES[i] for i in group], [PROMPTS[i] for i in group]
            found = token_logprobs(model, inputs, prompt_lengths=prompts, balance=True)
            found.balance.sum().backward(retain_graph=True)
            found.logprobs.sum().backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    with patch(model := build_preset("tiny-qwen3-moe")):
        assert not torch.equal(gradient([[0, 1, 2, 3]]), gradient(CUTS[1]))


def over_the_batch(record, layout):
    """The loss as transformers defines it: means over all tokens of the call."""
    rows = torch.cat(
        [
            torch.arange(s, s + n)
            for s, n in zip(layout.query_starts, layout.query_lens, strict=True)
        ]
    )
    layers = [Routed(z[rows], ids[rows]) for z, ids in record.layers]
    whole = sequence_balance(RoutingRecord(True, layers), PackedSequences.of([0], [len(rows)]))
    return whole.expand(len(layout.query_lens)) / len(layout.query_lens)


def test_the_batch_wise_loss_depends_on_the_cut():
    """Negative control."""
    from rl_consistency.models.scoring import token_logprobs as scoring

    with (
        patch(model := build_preset("tiny-olmoe")),
        attribute(scoring, "sequence_balance", over_the_batch),
    ):
        expected = balances(model, [[0, 1, 2, 3]])
        other = balances(model, CUTS[1])
        error = other["model.layers.1.mlp.gate.weight"] - expected["model.layers.1.mlp.gate.weight"]
        assert error.abs().max() > 1e-3 * expected["model.layers.1.mlp.gate.weight"].abs().max()


def test_the_gradient_check_covers_it_beside_the_policys_loss():
    def loss(scored, group):
        assert scored.balance is not None
        return scored.logprobs.sum() * 0.1 + scored.balance.sum() * 0.3

    with patch(model := build_preset("tiny-olmoe")):
        report = check_gradients(model, SEQUENCES, prompt_lengths=PROMPTS, loss=loss, balance=True)
    report.require_passed()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_moves_no_bit_or_is_refused(use_reentrant):
    model = build_preset("tiny-qwen3-moe").train()
    with patch(model):
        expected = balances(model, [[0, 1, 2, 3]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if not use_reentrant:
            assert first_difference(balances(model, CUTS[2]), expected) is None
            return
        model.enable_input_require_grads()
        with pytest.raises(ValueError, match="use_reentrant=True, which hides the routers"):
            balances(model, [[0, 1, 2, 3]])


def test_frozen_layers_below_leave_the_others_their_gradients():
    """The loss itself is that of all layers."""
    with patch(model := build_preset("tiny-olmoe", torch.bfloat16)):
        expected = balances(model, [[0, 1, 2, 3]])
        below = ("model.embed_tokens", "model.layers.0.")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(below))
        expected = {name: e for name, e in expected.items() if not name.startswith(below)}
        for groups in ([[0, 1, 2, 3]], *CUTS):
            assert first_difference(balances(model, groups), expected) is None
        assert expected["model.layers.1.mlp.gate.weight"].any()


def test_without_a_trained_router_there_is_no_gradient_and_it_says_so():
    with patch(model := build_preset("tiny-olmoe")):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "model.layers.1.mlp.experts.down_proj")
        with pytest.raises(ValueError, match="the routers and all below them are frozen; leave"):
            balances(model, [[0, 1, 2, 3]])


def test_a_dense_model_has_nothing_to_balance():
    with patch(model := build_preset("tiny-llama")), pytest.raises(ValueError, match="dense model"):
        token_logprobs(model, SEQUENCES, prompt_lengths=PROMPTS, balance=True)


def test_the_stock_router_is_balanced_too():
    with patch(model := build_preset("tiny-olmoe")), strict(except_={"router"}):
        found = balances(model, [[0, 1, 2, 3]])
    assert found["model.layers.0.mlp.gate.weight"].abs().max() > 0


def test_probabilities_are_counted_in_parts_that_fit():
    assert balance.UNIT * 2**22 < 2**63
