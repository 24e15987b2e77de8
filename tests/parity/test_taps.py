"""Taps find planted faults, one op of one layer each, and change nothing themselves."""

import pytest
import torch

from rl_consistency.kernels.linear import op as linear_op
from rl_consistency.models import modules
from rl_consistency.models.families import ops_of
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring import scored_rows, token_logprobs
from rl_consistency.parity import sides
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.localize import localize
from rl_consistency.parity.taps import tapped
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.substitution import attribute

LAYERS, ROW = 4, 3


def one_ulp_up(value):
    """The value with one element of one row moved to the next number."""
    moved = value.detach().clone()
    rows = moved[0] if moved.dim() >= 3 and moved.shape[0] == 1 else moved
    element = rows[ROW].view(-1)[:1]
    element.copy_(torch.nextafter(element, torch.full_like(element, torch.inf)))
    return torch.where(moved == value, value, value + (moved - value.detach()))


class UlpInBackward(torch.autograd.Function):
    """The identity, whose gradient is one ULP off in one row."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return one_ulp_up(gradient)


def later(name, fault, matches=None, every=1, at=0, owner=modules):
    """The op of a name, with a fault in what the second pass makes of one call: of those that
    match, or of call `at` in every so many."""
    run, seen = getattr(owner, name), []

    def faulty(*args, **named):
        if matches is not None and not matches(args):
            return run(*args, **named)
        seen.append(None)
        first_pass = len(seen) <= every
        if first_pass or (len(seen) - 1) % every != at:
            return run(*args, **named)
        return fault(run, *args, **named)

    return attribute(owner, name, faulty)


def output(run, *args, **named):
    value = run(*args, **named)
    if isinstance(value, tuple):
        return one_ulp_up(value[0]), *value[1:]
    return one_ulp_up(value)


def second_output(run, *args, **named):
    first, second = run(*args, **named)
    return first, one_ulp_up(second)


def input_gradient(index):
    def fault(run, *args, **named):
        changed = UlpInBackward.apply(args[index])
        return run(*args[:index], changed, *args[index + 1 :], **named)

    return fault


def fold(run, buffer, *args, **named):
    run(buffer, *args, **named)
    buffer.view(-1)[:1].nextafter_(torch.tensor(torch.inf))


WEIGHT_AT = {"rms_norm": 1, "linear": 1, "add_rms_norm": 2, "glu_linear": 2}
"""Op -> the argument that is its weight."""
OWNERS = {"token_logprobs": scored_rows, "fold_outer": linear_op}


def planted(model, op, fault, where):
    """A fault in an op: where its weight is that of a module, at a layer, or everywhere."""
    owner, options = OWNERS.get(op, modules), {}
    if isinstance(where, str):
        weight, at = model.get_parameter(f"model.{where}.weight"), WEIGHT_AT[op]
        options = {"matches": lambda args: args[at] is weight}
    elif where is not None:
        options = {"every": (7 if op == "fold_outer" else 1) * LAYERS, "at": where}
    return later(op, fault, owner=owner, **options)


SECOND_NORM = "post_attention_layernorm"
FAULTS = [
    # op, fault, where -> pass, op, layer, last part of the module
    ("rms_norm", output, "layers.0.input_layernorm", "forward rms_norm 0 input_layernorm"),
    ("rms_norm", output, "layers.3.self_attn.q_norm", "forward rms_norm 3 q_norm"),
    ("add_rms_norm", output, f"layers.1.{SECOND_NORM}", f"forward rms_norm 1 {SECOND_NORM}"),
    ("add_rms_norm", second_output, f"layers.1.{SECOND_NORM}", f"forward residual 1 {SECOND_NORM}"),
    ("add_rms_norm", output, "layers.2.input_layernorm", "forward rms_norm 2 input_layernorm"),
    ("add_rms_norm", second_output, "layers.2.input_layernorm", "forward residual 1 1"),
    ("add_rms_norm", output, "norm", "forward rms_norm None norm"),
    ("glu", output, 1, "forward glu 1 mlp"),
    ("attention_varlen", output, 3, "forward attention 3 self_attn"),
    ("rotary", output, 2, "forward rotary 2 self_attn"),
    ("glu_linear", output, "layers.0.mlp.down_proj", "forward linear 0 down_proj"),
    ("embedding", output, None, "forward embedding None embed_tokens"),
    ("token_logprobs", output, None, "forward token_logprobs None lm_head"),
    ("linear", input_gradient(0), "layers.2.mlp.up_proj", "backward linear 2 up_proj"),
    ("linear", input_gradient(0), "layers.1.self_attn.k_proj", "backward linear 1 k_proj"),
    ("attention_varlen", input_gradient(2), 1, "backward attention 1 self_attn"),
    *(
        ("add_rms_norm", input_gradient(0), f"layers.{n}.{norm}", f"backward rms_norm {n} {norm}")
        for n, norm in ((3, "input_layernorm"), (0, SECOND_NORM))
    ),
    ("glu_linear", input_gradient(0), 0, "backward glu 0 mlp"),
    ("rotary", input_gradient(1), 2, "backward rotary 2 self_attn"),
    ("token_logprobs", input_gradient(0), None, "backward token_logprobs None lm_head"),
    ("fold_outer", fold, 0, "backward linear 3 down_proj"),
]


@pytest.mark.parametrize(("op", "fault", "where", "expected"), FAULTS, ids=[f[3] for f in FAULTS])
def test_a_planted_fault_is_found_at_its_op_and_layer(
    model, op, fault, where, expected, found, work
):
    with planted(model, op, fault, where):
        result = found()
    assert not result.equal and result.promised
    first = result.first
    names = (first.pass_, first.op, first.layer, first.module.split(".")[-1])
    assert " ".join(map(str, names)) == expected
    if first.position is not None:
        row = work.prompt_lengths[0] - 1 + ROW if first.op == "token_logprobs" else ROW
        assert (first.sequence, first.position, first.tokens) == (0, row, 1)


def test_a_fault_of_the_rollout_alone_is_found_at_its_layer_and_position(model, work):
    run = modules.attention_paged
    options = {"prompt_lengths": [9], "between": ("rollout", "training"), "ablation": False}

    def faulty(q, paged, index, **named):
        value, lse = run(q, paged, index, **named)
        bad = index == 2 and len(q) > 1
        return (one_ulp_up(value) if bad else value), lse

    assert localize(model, work.sequences[:1], **options).equal
    with attribute(modules, "attention_paged", faulty):
        first = localize(model, work.sequences[:1], **options).first
    assert (first.op, first.layer, first.position, first.tokens) == ("attention", 2, ROW, 1)


def test_a_fault_of_the_rollouts_lm_head_is_found_after_all_layers(found, work):
    run = sides.distribution

    def faulty(logits, rows):
        return run(logits * (1 + 2**-20), rows)

    with attribute(sides, "distribution", faulty):
        result = found("rollout", "training")
    assert (result.first.op, result.first.layer) == ("token_logprobs", None)
    assert result.first.position == work.prompt_lengths[0] - 1
    assert result.logprobs.mismatched_tokens > 0 == result.logprobs.argmax_flips


def test_every_op_of_every_layer_is_tapped(found, model):
    ops = {*ops_of(model.config)}
    result = found("rollout", "training")
    assert result.equal
    per_layer = 17
    assert len(result.ops) == LAYERS * per_layer + 3
    assert {op.op for op in result.ops} == {*ops, "residual"}
    both = found()
    assert {op.op for op in both.ops if op.pass_ == "backward"} == ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-mistral"])
def test_every_family_and_dtype_is_equal_to_itself(name, dtype, work):
    model = build_preset(name, dtype)
    options = {"prompt_lengths": work.prompt_lengths, "ablation": False}
    with patch(model):
        of_rollout = localize(model, work.sequences, **options)
        result = localize(model, work.sequences, between=("training", "one_by_one"), **options)
    assert of_rollout.equal and result.equal
    own = [op for op in result.ops if op.what in ("gradient of weight", "gradient of bias")]
    assert len(own) == (0 if dtype is torch.float16 else len(list(model.parameters())))


def test_projections_of_one_launch_are_tapped_one_by_one(model, found):
    """As on a GPU, where inference fuses them; no GPU is needed to run the fused op."""

    def fuses(x, projections):
        return not torch.is_grad_enabled()

    def faulty(*args, run=modules.linear_qkv):
        q, k, v = run(*args)
        last = args[1][0] is model.get_parameter("model.layers.3.self_attn.q_proj.weight")
        return q, one_ulp_up(k) if last and k.shape[1] > ROW else k, v

    with attribute(modules, "_may_fuse", fuses):
        assert found("rollout", "training").equal
        with attribute(modules, "linear_qkv", faulty):
            first = found("rollout", "training").first
    assert (first.op, first.layer, first.module.split(".")[-1]) == ("linear", 3, "k_proj")


def test_gradients_that_were_there_are_no_gradients_of_a_side(model, found):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert {op.pass_ for op in found("rollout", "training").ops} == {"forward"}
    assert {op.pass_ for op in found(gradients=False).ops} == {"forward"}
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    model.zero_grad()


def test_a_call_for_some_rows_is_tapped_in_all(model):
    batch = PackedBatch.from_sequences([[5, 6, 7], [8] * 20], "cpu")
    call, wanted = (batch.input_ids, batch.position_ids, batch.layout), torch.tensor([2, 20])
    with torch.no_grad():
        expected = model.model.packed_forward(*call, wanted)
        with tapped(model, [3, 20]) as taps:
            found = model.model.packed_forward(*call, wanted)
    assert found.equal(expected) and len(found) == 2
    outputs = [value for tap, value in taps.forward().items() if tap.module.endswith("down_proj")]
    assert {len(value) for value in outputs} == {23}


def test_tapping_changes_no_byte_and_leaves_gradients_alone(model, work):
    def scored():
        return token_logprobs.token_logprobs(
            model, work.sequences, prompt_lengths=work.prompt_lengths
        ).logprobs

    def gradients_digest():
        return parameter_digest({name: p.grad for name, p in model.named_parameters()})

    def trained():
        model.zero_grad()
        (scored() * weights).sum().backward()
        return gradients_digest()

    weights = torch.randn(32, generator=torch.Generator().manual_seed(0))
    plain = trained()
    work = sides.Work(sequences=work.sequences, prompt_lengths=work.prompt_lengths)
    outcome = sides.run_side(model, "training", work)
    assert torch.equal(outcome.logprobs, scored().detach())
    assert gradients_digest() == plain
    own = outcome.backward.items()
    tapped = {tap.module: value for tap, value in own if tap.what == "gradient of weight"}
    for name, parameter in model.named_parameters():
        assert torch.equal(tapped[name.removesuffix(".weight")], parameter.grad.reshape(-1))
