import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.models import modules
from rl_consistency.models.families import ops_of
from rl_consistency.models.patch import patch
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.localize import check_bundle, localize, localize_bundle
from rl_consistency.parity.replay import load_replay_bundle, save_replay_bundle
from rl_consistency.parity.sides import SIDES
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.substitution import attribute


@pytest.mark.parametrize("side", sorted({*SIDES} - {"stock", "rollout"}))
def test_every_layout_of_training_is_equal_to_it_forward_and_backward(model, side, found):
    result = found("training", side)
    assert result.equal and result.first is None and result.logprobs.rms == 0
    passes = {op.pass_ for op in result.ops}
    assert passes == {"forward", "backward"}
    parameters = [op for op in result.ops if op.what in ("gradient of weight", "gradient of bias")]
    assert len(parameters) == len(list(model.parameters()))


def test_the_stock_path_differs_and_promises_nothing(found):
    result = found("training", "stock")
    assert not result.equal and not result.promised
    assert result.first.op == "rms_norm" and result.first.layer == 0
    growth = [op.relative_rms for op in result.ops if op.pass_ == "forward"]
    assert growth[0] == 0 < growth[-1]


def stock_attention_of(run, is_worse):
    def worse(q, k, v, layout, **named):
        out = run(q, k, v, layout, **named)
        return out * 1.001 if is_worse(layout) else out

    return attribute(modules, "stock_attention", worse)


def paged(layout):
    return isinstance(layout, PagedAttention)


def test_the_ablation_ranks_the_worst_stock_op_first(found, model):
    ops = ops_of(model.config)
    with stock_attention_of(modules.stock_attention, paged):
        rows = found("rollout", "training", ablation=True).ablation
    assert [row.mode for row in rows] == ["stock"] * len(ops) + ["canonical"] * len(ops)
    one_stock, one_canonical = rows[: len(ops)], rows[len(ops) :]
    assert {row.op for row in one_stock} == {row.op for row in one_canonical} == {*ops}
    worst, second = one_stock[:2]
    assert worst.op == "attention" and worst.mismatched_tokens == worst.tokens
    assert worst.rms > 100 * second.rms
    assert one_canonical[-1].op == "attention"  # its canonical order takes most of the drift away


def test_the_ablation_ranks_a_worst_canonical_op_first(found, work):
    run = modules.glu

    def worse(gate, up, activation):
        out = run(gate, up, activation)
        return out * 1.01 if gate.numel() // gate.shape[-1] == len(work.sequences) else out

    with attribute(modules, "glu", worse):
        result = found("rollout", "training", ablation=True)
    assert (result.first.op, result.first.layer) == ("glu", 0)
    one_canonical = [row for row in result.ablation if row.mode == "canonical"]
    assert one_canonical[0].op == "glu" and one_canonical[0].rms > 10 * one_canonical[1].rms


@pytest.fixture
def another_run(model):
    """A model of the same weights, to be changed."""
    made = AutoModelForCausalLM.from_config(model.config).eval()
    made.load_state_dict(model.state_dict())
    with patch(made):
        yield made


def test_another_run_differs_first_in_the_op_whose_weight_is_another(found, another_run, model):
    weight = another_run.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] *= 2
    result = found("training", "training", other=another_run, ablation=True)
    assert str(result.first).startswith("linear of layer 1 (model.layers.1.mlp.up_proj), forward")
    assert result.logprobs.mismatched_tokens > 0
    assert all(row.mismatched_tokens > 0 for row in result.ablation)


def test_models_that_are_not_alike_are_refused(found):
    other = build_preset("tiny-llama")
    message = r"not alike: .* has shape .* in the first, .* in the other"
    with patch(other), pytest.raises(ValueError, match=message):
        found("training", "training", other=other)
    with pytest.raises(ValueError, match="not patched"):
        found("training", "training", other=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"between": ("training", "magic")}, "give two of rollout, training, stock"),
        ({"between": ("training",)}, "give two of rollout, training, stock"),
        ({"prompt_lengths": [3, 1]}, "3 sequences and 2 prompt lengths"),
        ({"prompt_lengths": [3, 9, 6]}, "sequence 1 has 9 prompt tokens of 9"),
        ({"sequences": [[1, 2, 3, 400], [1, 2], [3] * 7]}, "outside the vocabulary of 331"),
    ],
)
def test_input_that_cannot_be_run_is_refused(model, change, message, work):
    given = {"sequences": work.sequences, "prompt_lengths": work.prompt_lengths} | change
    with pytest.raises(ValueError, match=message):
        localize(model, **given)


@pytest.fixture
def bundle(model, tmp_path, work):
    rollout = [torch.full((len(s) - p,), -1.0) for s, p in zip(work.sequences, work.prompt_lengths)]
    training = [part + 1e-6 for part in rollout]
    path = save_replay_bundle(
        tmp_path,
        sequences=work.sequences,
        prompt_lengths=work.prompt_lengths,
        rollout_logprobs=rollout,
        training_logprobs=training,
        config={"rollout": {"sampling": {"n": 2, "temperature": 0.5, "max_tokens": 13}}},
        parameter_digest=parameter_digest(model),
        fingerprint=fingerprint(),
    )
    return load_replay_bundle(path)


def test_a_bundle_is_run_with_its_own_tokens_and_sampling(model, bundle):
    plain = localize_bundle(model, bundle, ablation=False)
    assert plain.equal and plain.logprobs.tokens == 32 and plain.between == ("rollout", "training")


@pytest.mark.parametrize(
    ("stock", "setting"), [("attention,glu", "-attention,-glu"), ("none", "1")]
)
def test_a_bundle_of_other_ops_says_how_to_run_them(model, bundle, stock, setting):
    other = dataclasses.replace(bundle, fingerprint=bundle.fingerprint | {"stock_ops": stock})
    with (
        strict(except_={"linear"}),
        pytest.raises(ValueError, match=f"for its ops set RL_CONSISTENCY_STRICT={setting}\\."),
    ):
        check_bundle(model, other)


def test_a_bundle_of_other_weights_or_another_fingerprint_is_refused(model, bundle):
    other = copy.copy(bundle)
    object.__setattr__(other, "parameter_digest", "ab" * 32)
    with pytest.raises(ValueError, match=r"belongs to weights abababab.* another model"):
        localize_bundle(model, other)
    entries = bundle.fingerprint | {"torch": "1.0"}
    object.__setattr__(other, "fingerprint", entries)
    with pytest.raises(ValueError, match=r"another fingerprint: torch: .* != 1.0"):
        localize_bundle(model, other)
