"""The load-balancing loss of each sequence: what it is, and that no cut moves a bit of it."""

import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.models import decoder
from rl_consistency.models.moe import Routed, RoutingRecord, sequence_balance
from rl_consistency.models.packing import lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset
from tests.comparison import first_difference
from tests.models.captured.passes import gradients
from tests.models.test_modules import activation_checkpointing

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
        options = {"attention_mask": mask, "prompt_lengths": [PROMPTS[i] for i in group]}
        scored = token_logprobs(model, inputs, balance=True, **options)
        (scored.balance * 0.01).sum().backward()
        found.append(scored.balance.detach())
    return {"": torch.cat(found)} | gradients(model)


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
        parts = [found.balance.sum(), found.logprobs.sum()][:: 1 if first == "balance" else -1]
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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_moves_no_bit_or_is_refused(use_reentrant):
    model = build_preset("tiny-qwen3-moe").train()
    with patch(model):
        expected = balances(model, [[0, 1, 2, 3]])
        activation_checkpointing(model, {"use_reentrant": use_reentrant})
        if not use_reentrant:
            assert first_difference(balances(model, CUTS[2]), expected) is None
            return
        with pytest.raises(ValueError, match="use_reentrant=True, which hides the routers"):
            balances(model, [[0, 1, 2, 3]])


def test_without_a_trained_router_there_is_no_gradient_and_it_says_so():
    with patch(model := build_preset("tiny-olmoe")):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "model.layers.1.mlp.experts.down_proj")
        with pytest.raises(ValueError, match="the routers and all below them are frozen; leave"):
            balances(model, [[0, 1, 2, 3]])


def test_a_dense_model_has_nothing_to_balance():
    with patch(model := build_preset("tiny-llama")), pytest.raises(ValueError, match="dense model"):
        token_logprobs(model, SEQUENCES, prompt_lengths=PROMPTS, balance=True)
