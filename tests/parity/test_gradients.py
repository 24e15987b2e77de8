from contextlib import nullcontext

import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models.packing import lay_out
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.parity import gradients
from rl_consistency.parity.gradients import (
    REGROUPINGS,
    GradientReport,
    RegroupingResult,
    check_gradients,
)
from rl_consistency.verify.presets import PRESETS, build_preset
from tests.comparison import first_difference

LENGTHS = (20, 9, 33, 16, 41)
PROMPTS = [5, 3, 16, 1, 7]
TOTAL = sum(n - p for n, p in zip(LENGTHS, PROMPTS, strict=True))


def global_loss(scored, group):
    """Weights from the count of the whole batch."""
    weights = torch.cat(
        [torch.full((n,), 0.5 + 0.1 * i) for i, n in zip(group, scored.lengths, strict=True)]
    )
    return -((scored.logprobs + 0.01 * scored.entropy) * weights).sum() / TOTAL


def check(model, loss=global_loss, **options):
    sequences = probe_tokens(LENGTHS, model.config.vocab_size)
    return check_gradients(model, sequences, prompt_lengths=PROMPTS, loss=loss, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_regrouping_gives_the_same_bytes(preset, dtype):
    model = build_preset(preset, dtype)
    with patch(model):
        report = check(model)
    assert report.passed and report.first_parameter is None
    assert [r.name for r in report.results] == [r.name for r in REGROUPINGS]
    assert report.elements == sum(p.numel() for p in model.parameters())
    report.require_passed()


def test_a_gradient_that_is_zero_everywhere_is_not_a_check_that_passed():
    model = build_preset("tiny-qwen3")
    with patch(model):
        report = check(model, lambda *given: global_loss(*given) * 0.0)
    assert report.without_gradient and not report.passed and report.mismatched_elements == 0
    with pytest.raises(ConsistencyError, match="no gradient, nothing checked: all .* are zero"):
        report.require_passed()


def test_gradients_and_weights_are_left_as_they_were():
    model = build_preset("tiny-qwen3")
    with patch(model):
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        before = {name: g.clone() for name, g in gradients.items()}
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        check(model, regroupings=REGROUPINGS[:1])
        assert all(p.grad is gradients[name] for name, p in model.named_parameters())
        assert first_difference(gradients, before) is None
        assert (
            first_difference({n: p.detach() for n, p in model.named_parameters()}, weights) is None
        )


def test_absent_gradients_stay_absent_even_when_the_loss_raises():
    model = build_preset("tiny-llama")

    def broken(scored, group):
        if len(group) == 1:
            raise RuntimeError("stop")
        return scored.logprobs.sum()

    with patch(model), pytest.raises(RuntimeError, match="stop"):
        check(model, broken)
    assert all(p.grad is None for p in model.parameters())


def two_passes(checked, *, between=lambda model: None, dtype=torch.bfloat16, grad_dtype=None):
    """Gradients after two backward passes, with or without a check before the second."""
    model = build_preset("tiny-qwen3", dtype)
    with patch(model, grad_dtype=grad_dtype):
        model(torch.tensor([[4, 5, 6]])).logits.sum().backward()
        between(model)
        if checked:
            check(model, regroupings=REGROUPINGS[:1])
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_after_a_check(set_to_none):
    """A check between zero_grad and the next step leaves that step's bytes alone."""
    given = {"between": lambda m: m.zero_grad(set_to_none=set_to_none), "dtype": torch.float32}
    results = [two_passes(checked, **given) for checked in (False, True)]
    assert first_difference(*results) is None


@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
def test_accumulation_goes_on_after_a_check(grad_dtype):
    results = [two_passes(checked, grad_dtype=grad_dtype) for checked in (False, True)]
    assert first_difference(*results) is None


def test_a_check_that_keeps_no_gradients_begins_accumulation_again(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(gradients, "gradients_kept", nullcontext)
    results = [two_passes(checked) for checked in (False, True)]
    assert first_difference(*results) is not None


def test_gradients_that_are_no_numbers_fail():
    model = build_preset("tiny-llama")
    with patch(model):
        report = check(model, lambda scored, group: scored.logprobs.sum() * float("nan"))
    assert not report.passed and report.mismatched_elements == 0
    with pytest.raises(ConsistencyError, match=r"elements are NaN or infinite.*loss is finite"):
        report.require_passed()


def test_a_check_without_a_gradient_fails():
    model = build_preset("tiny-llama").requires_grad_(False)
    with patch(model):
        report = check(model, lambda scored, group: torch.zeros((), requires_grad=True).sum())
    with pytest.raises(ConsistencyError, match="no parameter takes part in the loss"):
        report.require_passed()


def test_equal_bytes_alone_pass_on_nothing_and_on_nan(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(GradientReport, "failure", lambda report: report.first_parameter)
    model = build_preset("tiny-llama")
    with patch(model):
        assert check(model, lambda scored, group: scored.logprobs.sum() * float("nan")).passed
        model.requires_grad_(False)
        assert check(model, lambda *_: torch.zeros((), requires_grad=True).sum()).passed


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("options", [{"enabled": False}, {"except_": {"linear"}}])
def test_stock_gradients_fail(preset, options):
    model = build_preset(preset)
    with patch(model), strict(**options):
        report = check(model)
    assert not report.passed and report.mismatched_elements > 0
    assert report.first_parameter in dict(model.named_parameters())
    with pytest.raises(ConsistencyError, match=r"gradients depend on how the batch was cut: '"):
        report.require_passed()


@pytest.mark.parametrize("masked", [False, True])
def test_a_sequence_that_no_loss_scores_is_left_out_where_it_stands_alone(masked):
    model, sequences = build_preset("tiny-qwen3-moe"), [[1, 2, 3, 4], [5, 6, 7]]
    scored = {"prompt_lengths": [1, 3]}
    if masked:
        scored = {"loss_mask": [[False, True, True, True], [False] * 3]}
    options = {"loss": lambda found, _: found.logprobs.sum(), **scored}
    with patch(model):
        assert check_gradients(model, sequences, **options).passed
        with pytest.raises(ValueError, match=r"sequences \[1\] have no scored token"):
            check_gradients(model, sequences, balance=True, **options)
        with pytest.raises(ValueError, match="no token is scored"):
            check_gradients(model, [[1]], prompt_lengths=[1], loss=options["loss"])


def test_weights_from_the_micro_batch_fail():
    """The usual slip: a mean over the tokens at hand."""
    model = build_preset("tiny-llama")
    with patch(model):
        report = check(model, lambda scored, group: scored.logprobs.mean())
    assert [r.name for r in report.results if r.mismatched_elements == 0] == ["right-padded"]


def test_another_order_of_sequences_fails():
    """What the fold does not promise: a batch in another logical order."""
    model = build_preset("tiny-llama")
    sequences = probe_tokens(LENGTHS, model.config.vocab_size)
    gradients = []
    with patch(model):
        for order in (range(5), reversed(range(5))):
            model.zero_grad()
            batch, _ = lay_out([sequences[i] for i in order], "packed")
            model.model.packed_forward(
                batch.input_ids, batch.position_ids, batch.layout
            ).sum().backward()
            gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    assert first_difference({"": gradients[0]}, {"": gradients[1]}) is not None


def test_a_result_shows_the_parameters_that_differ_only():
    assert repr(RegroupingResult("uneven", {"a": 0, "b": 0})).endswith(
        "0 elements of 2 parameters)"
    )
    assert repr(RegroupingResult("uneven", {"a": 0, "b": 3})).endswith("differing={'b': 3})")
