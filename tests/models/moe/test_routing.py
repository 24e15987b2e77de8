"""Who met which experts: records, and the one number that stands for them."""

import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.moe import (
    RoutingRecord,
    expert_fingerprints,
    record_routing,
    recorded_routing,
    stock_routing,
)
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset

SEQUENCES = probe_tokens((9, 33, 21), 331)


def test_every_other_set_of_experts_has_another_fingerprint():
    pairs = torch.combinations(torch.arange(12))
    layers = torch.cartesian_prod(torch.arange(len(pairs)), torch.arange(len(pairs)))
    found = expert_fingerprints(pairs[layers].to(torch.int32))
    assert found.dtype == torch.int64 and len(found.unique()) == len(found) == 66**2


def test_a_record_holds_the_layers_of_the_passes_inside_its_block_alone():
    logits, ids = torch.zeros(2, 3), torch.tensor([[0, 1], [1, 2]])
    record_routing(logits, ids)
    with recorded_routing() as outer:
        record_routing(logits, ids)
        with recorded_routing(logits=True) as inner:
            record_routing(logits, ids)
        record_routing(logits, ids)
    record_routing(logits, ids)
    assert [len(outer.layers), len(inner.layers)] == [2, 1]
    assert outer.layers[0].logits is None and inner.layers[0].logits is logits
    assert RoutingRecord().fingerprints() == ()
    (some,) = outer.fingerprints(torch.tensor([1]))
    assert torch.equal(some, outer.fingerprints()[0][1:])


@pytest.mark.parametrize("name, sparse", [("tiny-qwen3-moe", 1), ("tiny-olmoe", 2)])
def test_sparse_layers_alone_are_recorded_and_stock_meets_the_same_experts_in_fp32(name, sparse):
    model = build_preset(name)
    batch = PackedBatch.from_sequences(SEQUENCES[1:2])
    with torch.no_grad():
        with stock_routing(model) as passes:
            model(input_ids=torch.tensor(SEQUENCES[1:2]))
        with patch(model), recorded_routing() as record:
            packed_hidden_states(model, batch)
            with strict(except_={"router"}), recorded_routing() as by_stock:
                packed_hidden_states(model, batch)
            # Both records are read under the choice they were made under.
            (ours,) = record.fingerprints(batch.token_rows)
            with strict(except_={"router"}):
                (others,) = by_stock.fingerprints(batch.token_rows)
    assert len(record.layers) == sparse
    assert len(passes) == 1 and torch.equal(passes[0], ours) and torch.equal(others, ours)


def test_scores_of_a_dense_model_have_no_routing_and_those_of_a_sparse_one_one_for_each_token():
    for name, expected in (("tiny-llama", None), ("tiny-mixtral", 6 + 28 + 19)):
        with patch(model := build_preset(name)), torch.no_grad():
            found = token_logprobs(model, SEQUENCES, prompt_lengths=[3, 5, 2]).routing
        assert (found if found is None else len(found)) == expected


@pytest.mark.parametrize("layers", [1, 2])
def test_a_router_that_changes_its_number_of_experts_in_a_rollout_is_named(layers):
    model = build_preset("tiny-mixtral")
    with patch(model):
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=20)

        def change(*_):
            for layer in model.model.layers[:layers]:
                layer.mlp.gate.top_k = 1

        with pytest.raises(ConsistencyError, match="top_k|changed"):
            engine.generate([[2, 3, 4]], SamplingParams(max_tokens=8), progress=change)
