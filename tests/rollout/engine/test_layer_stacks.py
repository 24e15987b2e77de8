"""Layers copied, moved, removed or repeated: each place in the stack has its own cache."""

import copy

import pytest
import torch
from torch import nn

from rl_consistency.models.modules import CanonicalAttention
from rl_consistency.models.patch import patch
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset
from tests.rollout.engine.engines import engine_of, mismatched

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], list(range(20, 41))]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=8)


def grown(layers):
    return [*layers, copy.deepcopy(layers[1])]


def shortened(layers):
    return [layers[1]]


def turned(layers):
    return [layers[1], layers[0]]


def repeated(layers):
    return [layers[0], layers[1], layers[1]]


STACKS = [grown, shortened, turned, repeated]


def stacked(change):
    model = build_preset("tiny-llama")
    model.model.layers = nn.ModuleList(change(model.model.layers))
    model.config.num_hidden_layers = len(model.model.layers)
    return model


@pytest.mark.parametrize("change", STACKS)
def test_rollout_equals_training_and_both_are_the_stock_model(change):
    model = stacked(change)
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with patch(model) as session:
            session.verify()
            assert mismatched(engine_of(model, num_kv_blocks=64), model, PROMPTS, PARAMS) == 0
            assert (model(input_ids=ids).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("change", [grown, repeated])
def test_a_cache_that_goes_by_the_layers_own_number_is_caught(change, monkeypatch):
    """Negative control."""
    attend = CanonicalAttention._attend

    def by_number(self, q, k, v, layout, index):
        return attend(self, q, k, v, layout, self.layer_idx)

    monkeypatch.setattr(CanonicalAttention, "_attend", by_number)
    model = stacked(change)
    with patch(model):
        assert mismatched(engine_of(model, num_kv_blocks=64), model, PROMPTS, PARAMS) > 0
