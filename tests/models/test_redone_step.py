"""A backward pass that runs out of memory has folded part of its tokens: the step is begun anew."""

import importlib

import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.core import autograd
from rl_consistency.kernels.gradient_fold import gradient_buffer
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset
from tests.comparison import first_difference
from tests.kernels.gradient_fold.uses import hold_ends

cpu, cuda = (
    importlib.import_module(f"rl_consistency.kernels.token_logprobs.{device}")
    for device in ("op", "cuda")
)

CHUNK = 16
"""Tokens whose logit gradients exist at one time, so that a micro-batch has several."""
MICRO_BATCHES = ((9, 33), (2, 47))
"""Lengths of the sequences of each."""
POINTS = {
    "between chunks of the LM head": ("token_logprobs.lm_head", "matmul_nn", 2),
    "between layers": ("linear.op", "matmul_nn", 8),
    "in a layer": ("linear.op", "fold_outer", 8),
    "after every layer": ("pointwise.embedding", "fold_rows", 1),
}
"""Where memory runs out -> a kernel's module, what it calls there, and at which call."""
MODELS = [("tiny-qwen3", torch.bfloat16), ("tiny-llama", torch.float32)]
"""With tied embeddings, and with biases."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    choose_plan = cuda.choose_plan
    monkeypatch.setattr(cpu, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(cuda, "choose_plan", lambda *given: choose_plan(*given[:3], CHUNK))
    return request.param


@pytest.fixture(params=MODELS, ids=lambda given: given[0])
def model(request, device):
    preset, dtype = request.param
    model = build_preset(preset, dtype).to(device)
    with patch(model):
        yield model


def backward(model, micro_batch):
    sequences = probe_tokens(MICRO_BATCHES[micro_batch], model.config.vocab_size)
    scored = token_logprobs(model, sequences, prompt_lengths=[1] * len(sequences))
    (scored.logprobs.sum() + 0.1 * scored.entropy.sum()).backward()


def step(model):
    """Gradients of both micro-batches."""
    for i in range(len(MICRO_BATCHES)):
        backward(model, i)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def run_out(model, point, monkeypatch):
    """The first micro-batch, and the second until memory is said to run out."""
    module, name, turn = POINTS[point]
    module = importlib.import_module(f"rl_consistency.kernels.{module}")
    error, stock, calls = torch.OutOfMemoryError("no memory"), getattr(module, name), []

    def refused(*operands, **options):
        calls.append(name)
        if len(calls) == turn:
            raise error
        return stock(*operands, **options)

    backward(model, 0)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, refused)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            backward(model, 1)
    assert caught.value is error and len(calls) == turn


@pytest.mark.parametrize("set_to_none, held", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("point", POINTS)
def test_a_new_step_has_the_gradients_of_an_undisturbed_one(
    point, set_to_none, held, model, monkeypatch
):
    """Also before autograd has dropped the failed pass: the thread of a device drops it some time
    after `backward()` has raised."""
    expected = step(model)
    model.zero_grad(set_to_none=set_to_none)
    ends = hold_ends(monkeypatch) if held else []
    run_out(model, point, monkeypatch)
    model.zero_grad(set_to_none=set_to_none)
    ends.clear()
    assert first_difference(step(model), expected) is None


def test_if_no_error_of_an_op_ended_the_pass_the_new_step_would_be_refused(model, monkeypatch):
    """Negative control."""
    step(model)
    model.zero_grad()
    held = hold_ends(monkeypatch)
    monkeypatch.setattr(autograd, "_at_errors", [])
    run_out(model, "in a layer", monkeypatch)
    model.zero_grad()
    with pytest.raises(ValueError, match="took part in several forward passes"):
        step(model)
    held.clear()


@pytest.mark.parametrize("point", POINTS)
def test_the_micro_batch_alone_done_again_is_refused(point, model, monkeypatch):
    """Part of it has been folded, and would be twice."""
    run_out(model, point, monkeypatch)
    with pytest.raises(ValueError, match=r"ended in an error.*zero_grad\(\) and do all"):
        backward(model, 1)


def test_without_its_mark_part_of_a_micro_batch_is_folded_twice(model, monkeypatch):
    """Negative control."""
    expected = step(model)
    model.zero_grad()
    abandon = gradient_buffer._Gradient.abandon
    monkeypatch.setattr(
        gradient_buffer._Gradient, "abandon", lambda self, lost, op: abandon(self, False, op)
    )
    run_out(model, "in a layer", monkeypatch)
    backward(model, 1)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert first_difference(found, expected) is not None
