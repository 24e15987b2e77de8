"""Sparse blocks: stock's numbers up to rounding, one op on its stock path, filler, copies."""

import copy

import pytest
import torch

import rl_consistency.models.inventory as copied_settings_module
from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.modules import LayerCall
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import ROUTED, strict
from rl_consistency.verify.presets import build_preset
from tests.comparison import first_difference

SPARSE = ("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral")
SEQUENCES = probe_tokens((9, 33, 21), 331)


@pytest.fixture(params=SPARSE)
def model(request):
    return build_preset(request.param)


def gradients(model, groups=((0, 1, 2),)):
    model.zero_grad()
    for group in groups:
        sequences = [SEQUENCES[i] for i in group]
        scored = token_logprobs(model, sequences, prompt_lengths=[2] * len(group))
        (scored.logprobs * 0.01).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def stock_gradients(model):
    model.zero_grad()
    for tokens in SEQUENCES:
        ids = torch.tensor([tokens])
        logprobs = model(input_ids=ids).logits.log_softmax(-1)[0, 1:-1]
        (logprobs.gather(1, ids[0, 2:, None]) * 0.01).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_values_and_gradients_are_those_of_the_stock_model_up_to_rounding(model):
    stock, ids = copy.deepcopy(model), torch.tensor([SEQUENCES[1]])
    with torch.no_grad():
        right = stock(input_ids=ids).logits
    with patch(model):
        with torch.no_grad():
            assert torch.allclose(model(input_ids=ids).logits, right, rtol=1e-4, atol=1e-4)
        ours = gradients(model)
    for name, expected in stock_gradients(stock).items():
        assert (ours[name] - expected).norm() <= 1e-4 * expected.norm(), name


def test_mixtral_normalises_whatever_its_routers_are_given():
    """Stock's router has no such setting and does not look."""
    model, ids = build_preset("tiny-mixtral"), torch.tensor([SEQUENCES[1]])
    with torch.no_grad():
        right = model(input_ids=ids).logits
        model.model.layers[1].mlp.gate.norm_topk_prob = False
        assert torch.equal(model(input_ids=ids).logits, right)
        with patch(model):
            assert torch.allclose(model(input_ids=ids).logits, right, rtol=1e-4, atol=1e-4)


def test_mixtral_without_normalising_has_other_numbers(monkeypatch):
    model, ids = build_preset("tiny-mixtral"), torch.tensor([SEQUENCES[1]])
    with torch.no_grad():
        right = model(input_ids=ids).logits
        monkeypatch.setattr(copied_settings_module, "normalizes", lambda config: False)
        with patch(model):
            assert (model(input_ids=ids).logits - right).abs().max() > 0.1


@pytest.mark.parametrize("op", ROUTED)
def test_one_op_on_its_stock_path_is_the_ablation_it_promises(model, op):
    with patch(model):
        expected = gradients(model)
        with strict(except_={op}):
            actual = gradients(model)
        for name, gradient in expected.items():
            assert (actual[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
        assert first_difference(gradients(model, [[0], [1, 2]]), expected) is None


def test_both_on_their_stock_path_have_the_bits_of_transformers(model):
    """The block of an unpatched model, on the same rows."""
    rows = torch.randn(1, 20, 96, generator=torch.Generator().manual_seed(0))
    block = model.model.layers[1].mlp
    with torch.no_grad():
        right = block(rows)
        with patch(model), strict(except_=set(ROUTED)):
            found = block(rows, call=LayerCall((rows, rows), PackedSequences.of([0], [20])))
    assert torch.equal(found, right)


def test_filler_rows_reach_no_expert_in_a_packed_batch(model):
    seen, batch = [], PackedBatch.from_sequences(SEQUENCES, gap=2)
    with patch(model), torch.no_grad():
        model.model.layers[1].mlp.register_forward_hook(lambda _, given, out: seen.append(out[0]))
        packed_hidden_states(model, batch)
    filler = torch.ones(len(batch.input_ids), dtype=torch.bool)
    filler[batch.token_rows] = False
    assert not seen[0][filler].any() and seen[0][~filler].any()
