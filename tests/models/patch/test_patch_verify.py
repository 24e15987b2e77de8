import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rl_consistency.models import modules
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.models.patch import patch, patched_session
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import OPS, strict
from rl_consistency.verify.presets import PRESETS, build_preset
from tests.models.patch.tiny_models import tiny

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
GPT2 = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=61)


UNCOVERED = {
    "gpt2": (lambda: GPT2LMHeadModel(GPT2), "gpt2"),
    "dynamic": (lambda: tiny(rope_parameters=DYNAMIC), "rope_type 'dynamic'"),
    "linear": (lambda: nn.Linear(3, 3), "Linear is not a Hugging Face model"),
    "wrapper": (lambda: nn.Sequential(tiny()), "Sequential is not a Hugging Face model"),
}


@pytest.mark.parametrize("made, message", UNCOVERED.values(), ids=UNCOVERED)
def test_an_uncovered_model_is_refused_untouched(made, message):
    model = made()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=message):
        patch(model)
    assert [type(module) for module in model.modules()] == classes


def test_verify_names_a_class_that_was_swapped_back():
    model = build_preset("tiny-llama")
    with patch(model) as session:
        model.model.layers[1].mlp.up_proj.__class__ = nn.Linear
        with pytest.raises(ConsistencyError, match=r"mlp.up_proj \(Linear\) runs its stock"):
            session.verify()
        with pytest.raises(ValueError, match="runs its stock class; it was patched and changed"):
            patched_session(model)


def shadowed_by_its_class(model):
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("Other", (type(attention),), {"o_proj": nn.Linear(2, 2)})


def exchanged_for_a_copy(model):
    mlp = model.model.layers[1].mlp
    mlp.up_proj = copy.deepcopy(mlp.up_proj)


UNDOING = [(shadowed_by_its_class, "0.self_attn"), (exchanged_for_a_copy, "1.mlp.up_proj")]


@pytest.mark.parametrize("change, name", UNDOING)
def test_a_module_that_forward_would_not_find_undoes_the_patch(change, name):
    session = patch(model := build_preset("tiny-llama"))
    assert session.live
    change(model)
    assert not session.live
    with pytest.raises(ConsistencyError, match=f"not live: module model.layers.{name} "):
        session.verify()


@pytest.mark.parametrize("op", OPS)
def test_verify_fails_when_an_op_is_on_its_stock_path(op):
    model = build_preset("tiny-llama")
    refused = pytest.raises(ConsistencyError, match=f"stock path here: {op}")
    with patch(model) as session, strict(except_={op}), refused:
        session.verify()


@pytest.mark.parametrize("preset", PRESETS)
def test_verify_sees_a_matrix_product_that_depends_on_its_rows(preset, monkeypatch):
    """The classes are in place, the bytes are not: an order that changes below 16 rows."""

    def mutant(x, weight, bias=None, **buffers):
        flip = torch.arange(x.shape[-1]).flip(0)
        if x.shape[-2] < 32:
            return F.linear(x[..., flip].contiguous(), weight[:, flip].contiguous(), bias)
        return F.linear(x, weight, bias)

    model = build_preset(preset)
    with patch(model) as session:
        session.verify()
        monkeypatch.setattr(modules, "linear", mutant)
        with pytest.raises(ConsistencyError, match="probe tokens depend on their neighbours"):
            session.verify()


def test_a_session_outliving_its_model_says_so():
    session = patch(tiny("qwen3"))
    gc.collect()
    with pytest.raises(ValueError, match="no longer exists"):
        session.verify()


def test_the_stock_path_has_the_numeric_settings_from_before_the_patch():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with patch(model := tiny()) as session:
            assert torch.get_float32_matmul_precision() == "highest"
            with session.stock():
                assert torch.get_float32_matmul_precision() == "high"
            assert torch.get_float32_matmul_precision() == "highest"
            with session.stock():
                session.restore()
            assert torch.get_float32_matmul_precision() == "high"
        assert not isinstance(model, CanonicalModule)
    finally:
        torch.set_float32_matmul_precision(before)
