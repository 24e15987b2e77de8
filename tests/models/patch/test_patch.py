import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.models.patch import patch, patched_session
from rl_consistency.numerics.settings import SETTINGS
from rl_consistency.verify.presets import PRESETS, build_preset
from tests.comparison import first_difference
from tests.models.patch.tiny_models import tiny, tokens

BASE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_theta": 1e4},
    "linear": {"rope_theta": 1e4, "factor": 4.0},
    "llama3": BASE | BANDS,
    "yarn": BASE,
}


def outputs(model):
    """Logits and the gradients of all parameters, of one sequence."""
    model.zero_grad()
    logits = model(tokens(model)).logits
    logits.float().log_softmax(-1)[:, :, 0].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return gradients | {"logits": logits.detach()}


def state_bytes(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close_to_stock(model, bound=2e-4):
    stock = copy.deepcopy(model)
    ids = tokens(model)
    with torch.no_grad(), patch(model):
        ours = model(ids).logits
        expected = stock(ids).logits
    error = (ours.float() - expected.float()).norm() / expected.float().norm()
    assert error < bound


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("preset", PRESETS)
def test_logits_are_those_of_the_stock_model_up_to_rounding(preset, dtype, bound):
    assert_close_to_stock(build_preset(preset, dtype), bound)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rope_variants_are_those_of_the_stock_model(model_type, rope):
    rope = {"rope_type": rope, **ROPES[rope]}
    assert_close_to_stock(tiny(model_type, rope_parameters=rope))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_window_on_some_layers_is_that_of_the_stock_model(model_type):
    model = tiny(model_type, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    assert_close_to_stock(model)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations_are_those_of_the_stock_model(act):
    assert_close_to_stock(tiny("llama", hidden_act=act))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_restore_gives_the_stock_bytes_back(preset, dtype):
    model = build_preset(preset, dtype)
    untouched = copy.deepcopy(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    session = patch(model)
    outputs(model)
    model.zero_grad()
    session.restore()
    session.restore()
    assert first_difference(outputs(model), outputs(untouched)) is None
    assert all(type(a) is type(b) for a, b in zip(model.modules(), untouched.modules()))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_an_exception_restores_the_model():
    model = build_preset("tiny-qwen3")
    with pytest.raises(RuntimeError, match="stop"), patch(model):
        raise RuntimeError("stop")
    assert not any(isinstance(module, CanonicalModule) for module in model.modules())
    with patch(model):
        pass


@pytest.mark.parametrize("preset", PRESETS)
def test_a_patched_model_saves_as_the_stock_one(preset, tmp_path):
    model = build_preset(preset, torch.bfloat16)
    before, stock_class = state_bytes(model), type(model)
    with patch(model):
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded) is stock_class
    assert loaded.config.architectures == [stock_class.__name__]
    assert first_difference(state_bytes(loaded), before) is None
    with patch(loaded), patch(model):
        ids = tokens(model)
        with torch.no_grad():
            assert first_difference({"": loaded(ids).logits}, {"": model(ids).logits}) is None


def test_a_cast_keeps_the_dtype_asked_for_gradients():
    right = build_preset("tiny-qwen3", torch.bfloat16)
    model = build_preset("tiny-qwen3").to(torch.bfloat16).float()
    with patch(model, grad_dtype=torch.float32), patch(right, grad_dtype=torch.float32):
        model.to(torch.bfloat16)
        for each in (model, right):
            each(tokens(each)).logits.float().sum().backward()
        found, wanted = ({n: p.grad for n, p in m.named_parameters()} for m in (model, right))
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        assert first_difference(found, wanted) is None
        model.float()  # and so do its gradients, which stay
        model(tokens(model)).logits.sum().backward()
        model.to(torch.bfloat16)
        with pytest.raises(ValueError, match="has a gradient in torch.bfloat16, and grad_dtype is"):
            model(tokens(model))
        model.zero_grad(set_to_none=True)
        model(tokens(model)).logits.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_stock_runs_the_unpatched_model_inside_its_block():
    model = build_preset("tiny-llama")
    untouched, ids = copy.deepcopy(model), tokens(model)
    with patch(model) as session, torch.no_grad():
        ours = model(ids).logits
        with session.stock() as stock:
            assert stock is model and not session.live
            assert first_difference({"": stock(ids).logits}, {"": untouched(ids).logits}) is None
            with pytest.raises(ValueError, match="not patched"):
                patched_session(model)
        with pytest.raises(RuntimeError, match="stop"), session.stock():
            raise RuntimeError("stop")
        assert session.live
        assert first_difference({"": model(ids).logits}, {"": ours}) is None
        session.verify()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_patched_model_is_a_stock_model(copied):
    model, ids = build_preset("tiny-llama"), tokens(build_preset("tiny-llama"))
    untouched = copy.deepcopy(model)
    with patch(model) as session, torch.no_grad():
        expected = model(ids).logits
        other = copied(model)
        assert [type(m) for m in other.modules()] == [type(m) for m in untouched.modules()]
        attributes = [[set(vars(m)) for m in each.modules()] for each in (other, untouched)]
        assert attributes[0] == attributes[1]
        assert first_difference({"": other(ids).logits}, {"": untouched(ids).logits}) is None
        session.verify()
        with patch(other):
            assert first_difference({"": other(ids).logits}, {"": expected}) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_without_a_rule_of_its_own_fails(copied, monkeypatch):
    """Negative control."""
    monkeypatch.delattr(CanonicalModule, "__reduce_ex__")
    model = build_preset("tiny-llama")
    with patch(model), pytest.raises((TypeError, pickle.PicklingError), match="pickle"):
        copied(model)


def test_a_dropped_model_lets_go_of_the_settings(nothing_held):
    before = [setting.read() for setting in SETTINGS]
    model = build_preset("tiny-llama")
    patch(model)
    del model
    gc.collect()
    assert [setting.read() for setting in SETTINGS] == before


def test_a_module_at_two_places_is_refused_in_training_alone():
    model = build_preset("tiny-llama")
    model.model.layers = nn.ModuleList([*model.model.layers, model.model.layers[0]])
    model.config.num_hidden_layers = 3
    with patch(model):
        with pytest.raises(UnsupportedModelError, match="layers.0.* and .*layers.2.* are one mod"):
            model(tokens(model))
        with torch.no_grad():
            model(tokens(model))
        for parameter in model.model.layers[0].parameters():
            parameter.requires_grad_(False)
        model(tokens(model)).logits.sum().backward()
