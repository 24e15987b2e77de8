"""Taps on routers and experts find planted faults of theirs."""

import pytest
import torch

from rl_consistency.kernels.experts import cpu
from rl_consistency.models import moe
from rl_consistency.models.families import ops_of
from rl_consistency.models.patch import patch
from rl_consistency.parity.localize import localize
from rl_consistency.verify.presets import build_preset
from tests.parity.test_taps import ROW, fold, input_gradient, later, one_ulp_up

LAYER = {"every": 2, "at": 1}


def other_weights(run, *args, **named):
    ids, weights, *rest = run(*args, **named)
    return ids, one_ulp_up(weights), *rest


def other_experts(run, *args, **named):
    """As a k-th place that falls otherwise."""
    ids, *rest = run(*args, **named)
    ids = ids.clone()
    ids[ROW] = torch.tensor([0, 2] if ids[ROW].tolist() == [0, 1] else [0, 1])
    return ids, *rest


def output(run, *args, **named):
    return one_ulp_up(run(*args, **named))


FAULTS = [
    # op, fault -> pass, op, what
    ("route_with_logits", other_weights, "forward router output weights"),
    ("route_with_logits", other_experts, "forward router output expert ids"),
    ("experts", output, "forward experts output"),
    ("route_with_logits", input_gradient(0), "backward router gradient of its input"),
    ("experts", input_gradient(0), "backward experts gradient of its input"),
    ("experts", input_gradient(2), "backward experts gradient of its input weights"),
]


@pytest.fixture(scope="module")
def model():
    with patch(built := build_preset("tiny-olmoe")):
        yield built


def found(model, work, **options):
    options = {"between": ("training", "again"), "ablation": False} | options
    return localize(model, work.sequences, prompt_lengths=work.prompt_lengths, **options)


@pytest.mark.parametrize(("name", "fault", "expected"), FAULTS, ids=[f[2] for f in FAULTS])
def test_a_planted_fault_is_found_at_its_op_and_layer(model, name, fault, expected, work):
    with later(name, fault, owner=moe, **LAYER):
        first = found(model, work).first
    assert f"{first.pass_} {first.op} {first.what}" == expected
    assert (first.layer, first.sequence, first.position) == (1, 0, ROW)


def test_a_fault_in_a_fold_of_the_experts_is_found(model, work):
    with later("fold_outer", fold, every=30, at=0, owner=cpu):
        first = found(model, work).first
    assert (first.pass_, first.op) == ("backward", "experts")
    assert first.what in ("gradient of gate_up_proj", "gradient of down_proj")


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-mixtral"])
def test_sparse_models_are_equal_to_themselves_in_every_op(name, work):
    with patch(model := build_preset(name, torch.bfloat16)):
        assert found(model, work, between=("rollout", "training")).equal
        result = found(model, work, between=("training", "one_by_one"))
        assert result.equal
        ops = {*ops_of(model.config)} - ({"glu"} if name == "tiny-mixtral" else set())
        assert {op.op for op in result.ops} == {*ops, "residual"}
        own = [op for op in result.ops if op.what.startswith("gradient of ") and op.tokens is None]
        assert len(own) == len(list(model.parameters()))
