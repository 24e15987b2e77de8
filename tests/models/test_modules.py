import warnings
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models import decoder, modules
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.packing import PackedBatch, lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.verify.presets import PRESETS, build_preset
from tests.comparison import first_difference
from tests.models.captured.passes import gradients as gradients_of

LENGTHS = (9, 33, 21, 16)


def sequences(model):
    return probe_tokens(LENGTHS, model.config.vocab_size)


def loss(logits, targets):
    """A sum over tokens, so that the calls of a batch add up to the batch."""
    chosen = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -(chosen * 0.01)


def gradients(model, calls):
    """Gradients of all parameters over backward passes of `calls`, each (ids, options, mask)."""
    model.zero_grad()
    for ids, options, mask in calls:
        per_token = loss(model(ids, **options).logits, ids)
        per_token[mask].sum().backward()
    return gradients_of(model)


def padded(tokens, layout="left_padded"):
    ids, mask = lay_out(tokens, layout)
    return ids, {"attention_mask": mask}, mask.bool()


def call_forms(model):
    tokens = sequences(model)
    yield "single", [(torch.tensor([s]), {}, torch.ones(1, len(s)).bool()) for s in tokens]
    for layout in ("left_padded", "right_padded"):
        yield layout, [padded(tokens, layout)]
    flat = torch.tensor([[t for s in tokens for t in s]])
    positions = torch.cat([torch.arange(len(s)) for s in tokens])[None]
    yield "packed", [(flat, {"position_ids": positions}, torch.ones_like(flat).bool())]
    yield "uneven", [padded(tokens[:1]), padded(tokens[1:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_through_logits_do_not_depend_on_the_form_of_the_batch(preset, dtype):
    model = build_preset(preset, dtype)
    with patch(model):
        (_, expected), *others = [(name, gradients(model, c)) for name, c in call_forms(model)]
        assert all(g.dtype == dtype for g in expected.values())
        for name, found in others:
            assert first_difference(found, expected) is None, name


def activation_checkpointing(model, options):
    """Newer transformers have another name for it, and warn on the old one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(options)
    if options["use_reentrant"]:
        model.enable_input_require_grads()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mistral"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_byte(preset, dtype, use_reentrant):
    model = build_preset(preset, dtype).train()
    calls = dict(call_forms(model))["left_padded"]
    runs = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    with patch(model):
        plain = gradients(model, calls)
        assert len(runs) == 1
        activation_checkpointing(model, {"use_reentrant": use_reentrant})
        assert first_difference(gradients(model, calls), plain) is None
        assert len(runs) == 3


def test_a_tied_gradient_that_was_clipped_between_backward_passes_goes_on_clipped():
    model = build_preset("tiny-qwen3")
    ids, tied = torch.tensor([sequences(model)[1]]), model.lm_head.weight
    with patch(model):
        loss(model(ids).logits, ids).sum().backward()
        once = tied.grad.clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = tied.grad.clone()
        loss(model(ids).logits, ids).sum().backward()
    assert clipped.norm() < 1e-2 * once.norm()
    torch.testing.assert_close(tied.grad, clipped + once, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"past_key_values": object()}, "was given past_key_values"),
        ({"use_cache": True}, "was given use_cache"),
        ({"output_hidden_states": True}, "was given output_hidden_states"),
        ({"output_attentions": True, "use_cache": True}, "given output_attentions, use_cache"),
        ({"labels": torch.zeros(1, 3)}, "was given labels"),
        ({"inputs_embeds": torch.zeros(1, 3, 96), "input_ids": None}, "given inputs_embeds"),
        ({"input_ids": None}, "was given no input_ids"),
        ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep is a Tensor"),
        ({"logits_to_keep": None}, "logits_to_keep is a NoneType"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "4-D and blockwise masks"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "has a hole"),
    ],
)
def test_what_the_patched_forward_cannot_honour_is_refused(options, message):
    model = build_preset("tiny-llama")
    given = {"input_ids": torch.tensor([[1, 2, 3]])} | options
    with patch(model), pytest.raises(ValueError, match=message):
        model(**given)


def test_generation_with_a_cache_is_refused_while_patched():
    model = build_preset("tiny-llama")
    ids = torch.tensor([[1, 2, 3]])
    with patch(model), pytest.raises(ValueError, match="for decoding with a cache|past_key_values"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] >= 4


def test_harmless_options_are_accepted():
    model = build_preset("tiny-llama")
    ids = torch.tensor([[1, 2, 3, 4]])
    with patch(model), torch.no_grad():
        whole = model(ids, use_cache=False, past_key_values=None, return_dict=True).logits
        (tuple_logits,) = model(ids, return_dict=False)
        last = model(ids, logits_to_keep=2).logits
        hidden = model.model(ids).last_hidden_state
    assert first_difference({"": tuple_logits}, {"": whole}) is None
    assert first_difference({"": last}, {"": whole[:, -2:]}) is None
    assert hidden.shape == (1, 4, 96)


def test_a_token_outside_the_vocabulary_is_refused():
    model = build_preset("tiny-llama")
    for ids in ([1, 331], [-1, 5]):
        for score in (model, partial(token_logprobs, model, prompt_lengths=[1])):
            with patch(model), pytest.raises(ValueError, match="ids span .*vocabulary has 331"):
                score(torch.tensor([ids]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_fused_projections_give_the_same_bytes(preset, dtype, monkeypatch):
    model = build_preset(preset, dtype)
    batch = PackedBatch.from_sequences(sequences(model))
    asked = []

    def fusable(x, projections):
        asked.append(len(projections))
        return modules.all_plain(*projections)

    with patch(model), torch.no_grad():
        apart = packed_hidden_states(model, batch)
        monkeypatch.setattr(modules, "_may_fuse", fusable)
        fused = packed_hidden_states(model, batch)
    has_dense_layers = model.config.model_type not in ("olmoe", "mixtral")
    assert set(asked) == ({2, 3} if has_dense_layers else {3})
    assert first_difference({"": fused}, {"": apart}) is None


def test_projections_are_apart_on_a_cpu_with_gradients_and_on_the_stock_path(monkeypatch):
    model = build_preset("tiny-llama")
    x = torch.zeros(1, 3, 96)
    with patch(model):
        pair = (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj)
        fuses = partial(modules._may_fuse, x, pair)
        with torch.no_grad():
            assert not fuses()
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert not fuses()
        with torch.no_grad():
            assert fuses()
            with strict(except_={"linear"}):
                assert not fuses()
            with register_module_forward_hook(lambda *_: None):
                assert not fuses()
            assert fuses()
            pair[1].compile(backend="eager")
            assert not fuses()
            pair[1]._compiled_call_impl = None
            with monkeypatch.context() as own:
                own.setattr(pair[1], "forward", torch.zeros_like, raising=False)
                assert not fuses()
            assert fuses()
            pair[0].register_forward_hook(lambda *_: None)
            assert not fuses()


def test_a_dense_mlp_is_called_as_stock_calls_it():
    """FSDP2 around it rebuilds every dataclass among its arguments, which a layout refuses."""
    model = build_preset("tiny-qwen3-moe")  # its first layer is dense
    given = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda mlp, args, named: given.append((len(args), named)), with_kwargs=True
    )
    with patch(model), torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]))
    assert given == [(1, {})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["tiny-qwen2", "tiny-qwen3-moe"])
def test_an_addition_joined_to_the_next_norm_has_the_bytes_of_one_apart(preset, dtype):
    found, model = {}, build_preset(preset, dtype)
    batch = PackedBatch.from_sequences(sequences(model))
    with patch(model):
        layers = model.model.layers
        for name in ("joined", "apart"):
            assert all(layer.is_plain() for layer in layers) == (name == "joined")
            model.zero_grad()
            hidden = packed_hidden_states(model, batch)
            hidden.float().sum().backward()
            found[name] = {"hidden": hidden.detach(), **gradients_of(model)}
            layers[0].register_forward_hook(lambda *call: None)  # from now on it is seen
    assert first_difference(found["joined"], found["apart"]) is None


def test_a_joined_addition_that_loses_a_layers_mlp_is_noticed(monkeypatch):
    """Negative control."""
    model = build_preset("tiny-qwen2")
    batch = PackedBatch.from_sequences(sequences(model))
    run = decoder.CanonicalDecoderLayer.terms

    def losing(layer, total, addend, **named):
        return run(layer, total, None, **named)

    with patch(model), torch.no_grad():
        right = packed_hidden_states(model, batch)
        monkeypatch.setattr(decoder.CanonicalDecoderLayer, "terms", losing)
        wrong = packed_hidden_states(model, batch)
    assert first_difference({"": wrong}, {"": right}) is not None
