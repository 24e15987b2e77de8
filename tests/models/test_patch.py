import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_consistency.models import modules
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.models.patch import patch, patched_part, patched_session
from rl_consistency.numerics import settings
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import SETTINGS
from rl_consistency.numerics.strict import OPS, strict
from rl_consistency.parity.digest import first_difference
from rl_consistency.verify.presets import PRESETS, build_preset
from rl_consistency.verify.probe import probe_tokens


@pytest.fixture
def nothing_held(monkeypatch):
    """Sessions that other tests of this process left open hold no settings here."""
    gc.collect()
    monkeypatch.setattr(settings, "_held", settings._Held())


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def tiny(model_type="llama", **options):
    shape = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    config = AutoConfig.for_model(model_type, **(shape | options))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(model, length=130):
    return torch.tensor(probe_tokens([length], model.config.vocab_size))


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
    assert_close_to_stock(tiny(model_type, rope_parameters=ROPES[rope]))


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
def test_parameters_keep_their_names_and_bytes(preset):
    model = build_preset(preset)
    before, parameters = state_bytes(model), dict(model.named_parameters())
    with patch(model):
        assert first_difference(state_bytes(model), before) is None
        assert list(model.state_dict()) == list(before)
        assert all(parameters[name] is p for name, p in model.named_parameters())


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


def test_gradients_kept_over_restore_have_the_parameters_dtype():
    model = build_preset("tiny-qwen3", torch.bfloat16)
    with patch(model):
        model(tokens(model)).logits.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    model(tokens(model)).logits.float().sum().backward()


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


def test_strict_false_is_close_to_the_unpatched_model():
    model = build_preset("tiny-qwen3")
    ids = tokens(model)
    with patch(model) as session, torch.no_grad():
        with strict(False):
            ours = model(ids).logits
        with session.stock():
            expected = model(ids).logits
    assert (ours - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("op", OPS)
def test_each_op_alone_can_be_switched_to_its_stock_path(op):
    model = build_preset("tiny-qwen3", torch.bfloat16)
    with patch(model), strict(except_={op}):
        logits = model(tokens(model)).logits
        logits.float().sum().backward()
    assert torch.isfinite(logits).all()


def test_patching_twice_is_refused():
    model = build_preset("tiny-llama")
    with patch(model) as session:
        with pytest.raises(ValueError, match="patched already; restore"):
            patch(model)
        assert patched_session(model) is session
        session.verify()
    with patch(model):
        pass


def test_patching_a_copy_of_a_patched_model_is_refused():
    model = build_preset("tiny-llama")
    with (
        patch(model),
        pytest.raises(ValueError, match="copy of a patched one; copy a model before"),
    ):
        patch(copy.deepcopy(model))


def test_two_models_may_be_patched_and_restored_in_any_order(nothing_held):
    before = [setting.read() for setting in SETTINGS]
    policy, reference = build_preset("tiny-llama"), build_preset("tiny-qwen3")
    first, second = patch(policy), patch(reference)
    first.restore()
    second.verify()
    second.restore()
    assert [setting.read() for setting in SETTINGS] == before


def test_a_dropped_model_lets_go_of_the_settings(nothing_held):
    before = [setting.read() for setting in SETTINGS]
    model = build_preset("tiny-llama")
    patch(model)
    del model
    gc.collect()
    assert [setting.read() for setting in SETTINGS] == before


class LoraLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2.0


def lora(model):
    layer = model.model.layers[1].self_attn
    layer.q_proj = LoraLinear(layer.q_proj.in_features, layer.q_proj.out_features, bias=False)


def dropout(model):
    model.model.layers[0].mlp.drop = nn.Dropout(0.1)


@pytest.mark.parametrize(
    "model, message",
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=61)),
            "gpt2",
        ),
        (
            lambda: tiny(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope_type 'dynamic'",
        ),
        (lambda: tiny(attention_dropout=0.1), "attention_dropout=0.1"),
        (lambda: tiny().to(torch.float8_e4m3fn), "fp8 is not covered"),
        (lambda: tiny().double(), "torch.float64"),
        (lambda: nn.Linear(3, 3), "Linear is not a Hugging Face model"),
        (lambda: nn.Sequential(tiny()), "Sequential is not a Hugging Face model"),
    ],
    ids=["gpt2", "dynamic", "dropout", "fp8", "fp64", "linear", "wrapper"],
)
def test_an_uncovered_model_is_refused_untouched(model, message):
    model = model()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=message):
        patch(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    "change, message",
    [
        (lora, r"module model.layers.1.self_attn.q_proj \(LoraLinear\) has no canonical order"),
        (dropout, r"module model.layers.0.mlp.drop \(Dropout\) has no canonical order"),
        (lambda m: m.model.norm.bfloat16(), "model.norm.weight is torch.bfloat16"),
    ],
    ids=["lora", "dropout module", "mixed dtypes"],
)
def test_an_uncovered_module_is_named(change, message):
    model = tiny()
    change(model)
    with pytest.raises(UnsupportedModelError, match=message):
        patch(model)
    assert not any(isinstance(module, CanonicalModule) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_verify_passes_while_the_patch_is_live(preset, dtype):
    model = build_preset(preset, dtype)
    with patch(model) as session:
        session.verify()
        assert session.live and session.model is model
    assert not session.live


def test_verify_fails_after_restore():
    session = patch(model := build_preset("tiny-llama"))
    session.restore()
    with pytest.raises(ConsistencyError, match="patch is not live: the whole model"):
        session.verify()
    del model


def test_a_part_of_a_module_that_is_not_patched_is_refused():
    for model in (nn.Linear(2, 2), build_preset("tiny-llama")):
        with pytest.raises(ValueError, match="not patched"):
            patched_part(model, "lm_head")


def test_verify_names_a_class_that_was_swapped_back():
    model = build_preset("tiny-llama")
    with patch(model) as session:
        model.model.layers[1].mlp.up_proj.__class__ = nn.Linear
        with pytest.raises(ConsistencyError, match="module model.layers.1.mlp.up_proj runs its"):
            session.verify()
        with pytest.raises(ValueError, match="not patched"):
            patched_session(model)


class Projection(nn.Module):
    """In place of a module that the patch knows, under its name."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept


def shadow(model):
    mlp = model.model.layers[1].mlp
    mlp.__dict__["up_proj"] = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features)


def shadow_by_class(model):
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("Other", (type(attention),), {"o_proj": nn.Linear(2, 2)})


def replace(model):
    mlp = model.model.layers[1].mlp
    mlp.up_proj = copy.deepcopy(mlp.up_proj)


def replace_container(model):
    model.model.layers = nn.ModuleList(model.model.layers)


def wrap(model):
    model.model.layers[0] = Projection(model.model.layers[0])


def rename(model):
    attention = model.model.layers[0].self_attn
    attention._modules["query"] = attention._modules.pop("q_proj")


def vanish(model):
    del model.model.norm


@pytest.mark.parametrize(
    "change, name",
    [
        (shadow, "model.layers.1.mlp.up_proj"),
        (shadow_by_class, "model.layers.0.self_attn.o_proj"),
        (replace, "model.layers.1.mlp.up_proj"),
        (replace_container, "model.layers"),
        (wrap, "model.layers.0"),
        (rename, "model.layers.0.self_attn.q_proj"),
        (vanish, "model.norm"),
    ],
)
def test_a_module_that_forward_would_not_find_undoes_the_patch(change, name):
    model = build_preset("tiny-llama")
    session = patch(model)
    assert session.live
    change(model)
    assert not session.live
    with pytest.raises(ConsistencyError, match=f"not live: module {name} "):
        session.verify()


def test_a_reference_to_a_parent_does_not_stop_the_patch_from_being_checked():
    model = build_preset("tiny-llama")
    with patch(model) as session:
        model.model.norm.above = model
        assert session.live
        model.model.norm = copy.copy(model.model.norm)
        assert not session.live


@pytest.mark.parametrize("op", OPS)
def test_verify_fails_when_an_op_is_on_its_stock_path(op):
    model = build_preset("tiny-llama")
    refused = pytest.raises(ConsistencyError, match=f"stock path here: {op}")
    with patch(model) as session, strict(except_={op}), refused:
        session.verify()


def test_verify_fails_when_a_setting_was_changed(nothing_held):
    model = build_preset("tiny-llama")
    before = torch.get_float32_matmul_precision()
    with patch(model) as session:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(ConsistencyError, match="float32_matmul_precision is 'medium'"):
            session.verify()
    assert torch.get_float32_matmul_precision() == before


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


def test_a_parameter_replaced_after_patching_is_refused():
    model = build_preset("tiny-llama")
    with patch(model):
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        with pytest.raises(ValueError, match="Linear.weight was replaced after patch"):
            model(tokens(model))


def test_a_session_outliving_its_model_says_so():
    session = patch(Qwen3ForCausalLM(Qwen3Config(**tiny_qwen3_shape())))
    gc.collect()
    with pytest.raises(ValueError, match="no longer exists"):
        session.verify()


def tiny_qwen3_shape():
    return {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }


def test_a_forward_replaced_on_the_instance_is_refused_before_and_noticed_after():
    model = tiny("qwen3")
    norm = model.model.norm
    norm.forward = norm.forward
    with pytest.raises(UnsupportedModelError, match=r"model\.norm .*replaced on the instance"):
        patch(model)
    del norm.forward
    with patch(model) as session:
        norm.forward = norm.forward
        with pytest.raises(ConsistencyError, match=r"model\.norm"):
            session.verify()


def test_a_bare_decoder_is_refused():
    with pytest.raises(UnsupportedModelError, match="takes the Qwen3ForCausalLM itself"):
        patch(tiny("qwen3").model)


def test_restoring_inside_a_stock_block_leaves_the_stock_model():
    model = tiny("qwen3")
    before = [type(m) for m in model.modules()]
    session = patch(model)
    with session.stock():
        session.restore()
    assert [type(m) for m in model.modules()] == before


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
