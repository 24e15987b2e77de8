"""A user's own loop, with torch's optimizers: ordinary gradients, the same bits for every cut."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer, TrainingArguments

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset
from tests.comparison import first_difference

LENGTHS = (9, 33, 21, 16, 40, 5)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(micro_batch, device, preset="tiny-qwen3", **options):
    model = build_preset(preset, torch.bfloat16).to(device)
    seen = []
    with patch(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient.dtype))
        sequences = probe_tokens(LENGTHS, model.config.vocab_size)
        for _ in range(3):
            for start in range(0, len(sequences), micro_batch):
                batch = sequences[start : start + micro_batch]
                scored = token_logprobs(model, batch, prompt_lengths=[1] * len(batch))
                (-scored.logprobs.sum() / sum(LENGTHS)).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert seen == [torch.bfloat16] * 3 * -(-len(sequences) // micro_batch)
        return weights(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
def test_adamw_gives_the_same_weights_for_every_cut(preset, options, device):
    whole = trained(6, device, preset, **options)
    assert first_difference(whole, weights(build_preset(preset, torch.bfloat16))) is not None
    for micro_batch in (1, 2, 4):
        assert first_difference(trained(micro_batch, device, preset, **options), whole) is None


def losses(model):
    for row in probe_tokens((24, 24), model.config.vocab_size):
        yield model(torch.tensor([row])).logits.float().square().mean()


def test_autograd_grad_of_anything_leaves_the_gradients_alone():
    model = build_preset("tiny-qwen3", torch.bfloat16)
    with patch(model):
        first, second = losses(model)
        first.backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        found = torch.autograd.grad(second, list(model.parameters()), retain_graph=True)
        hidden = torch.zeros(1, 4, model.config.hidden_size, dtype=torch.bfloat16)
        logits = model.lm_head(hidden.requires_grad_())
        torch.autograd.grad(logits.sum(), hidden)
        present = {name: p.grad for name, p in model.named_parameters()}
        assert first_difference(present, before) is None
        model.zero_grad()
        second.backward()
        present = {name: p.grad for name, p in model.named_parameters()}
        assert first_difference(dict(zip(present, found, strict=True)), present) is None


def test_losses_of_several_forward_passes_go_backward_one_by_one():
    model = build_preset("tiny-llama")
    with patch(model):
        first, second = losses(model)
        with pytest.raises(ValueError, match="Call backward.. for each"):
            (first + second).backward()


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
def test_a_second_backward_pass_of_one_forward_pass_adds_to_no_gradient(preset):
    """Folded one after the other, the sum would depend on the cut. What begins from nothing, or
    writes no gradient, is right."""
    model = build_preset(preset)
    ids = torch.tensor(probe_tokens((9,), model.config.vocab_size))
    with patch(model):
        scored = token_logprobs(model, ids, prompt_lengths=[1])
        first, second = scored.logprobs.sum(), scored.entropy.sum()
        (found,) = torch.autograd.grad(first, model.model.norm.weight, retain_graph=True)
        first.backward(retain_graph=True)
        assert torch.equal(found, model.model.norm.weight.grad)
        torch.autograd.grad(second, model.model.norm.weight, retain_graph=True)
        with pytest.raises(ValueError, match="second backward pass of one forward.*Add the losses"):
            second.backward(retain_graph=True)
        for set_to_none in (True, False):
            model.zero_grad(set_to_none=set_to_none)
            second.backward(retain_graph=True)
        next(losses(model)).backward()


def test_where_nothing_counts_backward_passes_gradients_depend_on_the_cut(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(BackwardPasses, "again", False)
    model, gradients = build_preset("tiny-llama", torch.bfloat16), []
    rows = probe_tokens((24, 24), model.config.vocab_size)
    with patch(model):
        for cut in ([rows], [[row] for row in rows]):
            model.zero_grad()
            for part in cut:
                scored = token_logprobs(model, part, prompt_lengths=[1] * len(part))
                scored.logprobs.sum().backward(retain_graph=True)
                scored.entropy.sum().backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert first_difference(*gradients) is not None


LOSSES = {
    "logprobs": lambda model, ids: token_logprobs(model, ids, prompt_lengths=[1]).logprobs.sum(),
    "entropy": lambda model, ids: token_logprobs(model, ids, prompt_lengths=[1]).entropy.sum(),
    "logits": lambda model, ids: model(ids).logits.sum(),
    "hidden states": lambda model, ids: model.model(ids).last_hidden_state.sum(),
}


@pytest.mark.parametrize("output", LOSSES)
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
def test_a_graph_of_the_backward_pass_is_refused(preset, output):
    model = build_preset(preset)
    ids = torch.tensor(probe_tokens((9,), model.config.vocab_size))
    with patch(model):
        weight = model.model.layers[0].mlp.up_proj.weight
        with pytest.raises(ValueError, match="create_graph=True.*not covered"):
            torch.autograd.grad(LOSSES[output](model, ids), weight, create_graph=True)
        with pytest.raises(ValueError, match="create_graph=True.*not covered"):
            LOSSES[output](model, ids).backward(create_graph=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        LOSSES[output](model, ids).backward()


def test_a_gradient_of_another_dtype_is_refused_before_the_patch():
    model = build_preset("tiny-llama", torch.bfloat16)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(ValueError, match=r"lm_head.weight has a gradient in torch.bfloat16"):
        patch(model, grad_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"grad_dtype is torch.float16; it is torch.float32"):
        patch(model, grad_dtype=torch.float16)
    with patch(model):  # nothing of either was kept
        next(losses(model)).backward()


def test_the_gradients_dtype_is_given_back():
    model = build_preset("tiny-llama", torch.bfloat16)
    with patch(model, grad_dtype=torch.float32):
        next(losses(model)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    next(losses(model)).backward()


class Rows(torch.utils.data.Dataset):
    def __init__(self, vocabulary):
        self.rows = probe_tokens((24,) * 8, vocabulary)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = torch.tensor(self.rows[i])
        return {"input_ids": ids, "labels": ids}


class ScoringTrainer(Trainer):
    model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs["input_ids"].tolist()
        scored = token_logprobs(model, rows, prompt_lengths=[1] * len(rows))
        return -scored.logprobs.sum() / num_items_in_batch


def test_the_transformers_trainer_with_its_defaults_gives_the_same_weights_for_every_cut(tmp_path):
    found = []
    for size, steps in ((4, 1), (2, 2), (1, 4)):
        model = build_preset("tiny-qwen3", torch.bfloat16)
        given = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        with patch(model):
            ScoringTrainer(model, given, train_dataset=Rows(model.config.vocab_size)).train()
        found.append(weights(model))
    assert first_difference(found[0], weights(build_preset("tiny-qwen3", torch.bfloat16)))
    assert first_difference(found[1], found[0]) is None
    assert first_difference(found[2], found[0]) is None
