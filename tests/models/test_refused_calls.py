"""What torch does with a model, and no kernel can follow, is refused in one line with its remedy;
what a caller asks for by the config is honoured or refused."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset

IDS = torch.tensor([[3, 9, 27, 81]])


@pytest.fixture(scope="module")
def model():
    with patch(model := build_preset("tiny-llama")):
        yield model


def scores(model):
    return token_logprobs(model, IDS.tolist(), prompt_lengths=[1]).logprobs


def fake(model):
    with FakeTensorMode() as mode:
        model(mode.from_tensor(IDS))


def by_parameters(model):
    parameters = dict(model.named_parameters())
    grad(lambda given: functional_call(model, given, (IDS,)).logits.sum())(parameters)


TRANSFORMS = {
    "trace": (lambda model: torch.jit.trace(model, (IDS,), strict=False), "torch.jit.trace of a"),
    "trace of the decoder": (
        lambda model: torch.jit.trace(model.model, (IDS,)),
        "trace of a patch",
    ),
    "vmap": (lambda model: vmap(lambda i: model(i[None]).logits)(IDS), r"torch.func.*not covered"),
    "vmap of scores": (
        lambda model: vmap(lambda weight: scores(model) * weight)(torch.ones(2)),
        r"torch.func .*session.stock\(\)",
    ),
    "grad": (by_parameters, r"torch.func .*session.stock\(\)"),
    "fake tensors": (fake, "input_ids is a FakeTensor; a plain tensor"),
}


@pytest.mark.parametrize("transform, message", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_is_refused_in_one_line(transform, message, model):
    with pytest.raises((ValueError, TypeError), match=message):
        transform(model)


OUTPUTS = {
    "scores": scores,
    "logits": lambda model: model(IDS).logits,
    "hidden states": lambda model: model.model(IDS).last_hidden_state,
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_batched_gradients_are_refused(output, model):
    out = output(model)
    with pytest.raises(ValueError, match="is_grads_batched=True: .*once for each"):
        torch.autograd.grad(
            out, model.model.norm.weight, torch.ones(2, *out.shape), is_grads_batched=True
        )


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mixtral"])
def test_a_shallow_copy_is_refused_and_a_deep_one_is_stock(preset):
    with patch(model := build_preset(preset)):
        for module in (model, model.model.layers[0].mlp):
            with pytest.raises(ValueError, match=r"shallow copy of a patched .*deepcopy"):
                copy.copy(module)
        assert copy.deepcopy(model)(IDS).logits.shape == (1, 4, model.config.vocab_size)


@pytest.mark.parametrize("index", [-2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_row_of_padding_has_no_gradient_as_in_stock(index, when):
    models = [build_preset("tiny-llama") for _ in range(2)]
    ids = torch.tensor([[3, 329, 3, 330, 329, 5]])
    for patched, model in enumerate(models):
        if patched and when == "after":
            patch(model)
        model.model.embed_tokens.padding_idx = index
        if patched and when == "before":
            patch(model)
        model(ids).logits.square().sum().backward()
    stock, found = (model.model.embed_tokens.weight.grad for model in models)
    assert not stock[index].any() and not found[index].any()
    torch.testing.assert_close(found, stock, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_asked_for_by_another_are_those_of_stock(dtype):
    model = build_preset("tiny-qwen3", dtype)
    x, positions = torch.zeros(2, 5, 96, dtype=dtype), torch.arange(5).expand(2, 5)
    right = model.model.rotary_emb(x, positions)
    with patch(model):
        found = model.model.rotary_emb(x, position_ids=positions)
    assert all(map(torch.equal, found, right)) and found[0].dtype == dtype


def test_return_dict_of_the_config_is_honoured(model):
    logits = model(IDS).logits
    model.config.return_dict = False
    try:
        assert torch.equal(model(IDS)[0], logits) and isinstance(model.model(IDS), tuple)
        assert torch.equal(model(IDS, return_dict=True).logits, logits)
        assert model.model(IDS, return_dict=True).last_hidden_state.shape == (1, 4, 96)
    finally:
        model.config.return_dict = True
    assert isinstance(model.model(IDS, return_dict=False), tuple)


def test_inference_mode_that_was_left_on_is_named(model):
    right = scores(model)
    with torch.inference_mode():
        assert torch.equal(scores(model), right)
        model.train()
        try:
            for output in OUTPUTS.values():
                with pytest.raises(
                    ValueError, match="inference_mode is on, and the model is in tr"
                ):
                    output(model)
            model.requires_grad_(False)
            assert torch.equal(scores(model), right)
        finally:
            model.requires_grad_(True).eval()


NONSENSE = {
    "heads": {"num_attention_heads": None},
    "layers": {"num_hidden_layers": "2"},
    "eps": {"rms_norm_eps": None},
    "no rope": {"rope_parameters": None},
    "empty rope": {"rope_parameters": {}},
    "half a rope": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "layer types": {"layer_types": 5},
    "no layer type": {"layer_types": [None, None]},
    "window": {"sliding_window": "x"},
}


@pytest.mark.parametrize("values", NONSENSE.values(), ids=NONSENSE)
def test_a_config_that_fits_nothing_is_named(values):
    model = build_preset("tiny-qwen3")
    with patch(model) as session:
        scores(model)
        vars(model.config).update(values)
        with pytest.raises(
            UnsupportedModelError, match=r"config that no model can be made of \(\w+"
        ):
            scores(model)
        assert not session.live
    with pytest.raises(UnsupportedModelError, match="config that no model can be made of"):
        patch(model)
