"""The guard: what it lets pass, and what it looks at beside the modules."""

import shutil
from unittest.mock import Mock

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from rl_consistency.models import decoder, installed_code, modules
from rl_consistency.models import patch as patching
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.inventory import faults
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset
from tests.comparison import first_difference
from tests.models.inventory.scores import halved, rolled_out, scores, stock_scores, tokens

ALLOWED = (
    *("model.embed_tokens", "model.norm", "model.layers.0"),
    *(f"model.layers.0.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")),
    *(f"model.layers.1.self_attn{part}" for part in ("", ".q_proj", ".k_norm", ".o_proj")),
    *("model.layers.1.mlp", "model.layers.1.mlp.up_proj"),
)


@pytest.mark.parametrize("path", ALLOWED)
def test_a_hook_where_the_forward_calls_is_run_in_rollout_and_training(path, model):
    model.get_submodule(path).register_forward_hook(halved)
    right = stock_scores(model)
    with patch(model) as session:
        session.verify()
        assert (scores(model) - right).abs().max() < 1e-4
        prompts, found = tokens(model, 9, 17), rolled_out(model)
        sequences = [[*prompts[c.prompt_index], *c.token_ids] for c in found]
        lengths = [len(prompts[c.prompt_index]) for c in found]
        again = token_logprobs(model, sequences, prompt_lengths=lengths).split()
    assert all(torch.equal(c.token_logprobs, own) for c, own in zip(found, again, strict=True))


def test_a_fused_norm_passes_over_its_hook(model, monkeypatch):
    """Negative control."""
    norm = model.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(halved)
    right = stock_scores(model)
    monkeypatch.setattr(modules, "all_plain", lambda *parts: True)
    with patch(model):
        assert (scores(model) - right).abs().max() > 1e-2


def changed(model):
    model.train()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.use_cache, model.config.pad_token_id = False, 10**6
    model.model.norm.note = "mine"
    model.generate = lambda *_: None


def test_what_no_forward_reads_may_be_changed(model):
    with patch(model) as session:
        before = scores(model)
        changed(model)
        assert first_difference({"": scores(model)}, {"": before}) is None
        session.verify()
    changed(model)
    with patch(model) as session:
        session.verify()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_a_model_that_was_cast_is_what_its_config_makes(preset, dtype):
    model = build_preset(preset)
    assert faults(model) == []
    assert faults(model.to(dtype)) == []
    assert faults(model.float()) == []


def test_the_guard_looks_closer_only_after_a_change(model, monkeypatch):
    looks = Mock(side_effect=faults)
    monkeypatch.setattr(patching, "faults", looks)
    with patch(model):
        looks.reset_mock()
        for _ in range(3):
            scores(model)
            model.train(not model.training)
        assert looks.call_count == 1
        model.model.norm.register_forward_hook(lambda *_: None)
        scores(model)
        scores(model)
        assert looks.call_count == 2


# fp16 is computed and not trained; torch has its usual defaults.

IDS = [[1, 2, 3, 4, 5, 6, 7]]


def scored_ids(model):
    return token_logprobs(model, IDS, prompt_lengths=[1]).logprobs


def logits(model):
    return model(input_ids=torch.tensor(IDS)).logits


def hidden_states(model):
    return model.model(input_ids=torch.tensor(IDS)).last_hidden_state


@pytest.mark.parametrize("compute", [scored_ids, logits, hidden_states])
@pytest.mark.parametrize("tied", ["tiny-qwen3", "tiny-llama"])
def test_fp16_training_is_refused_before_a_gradient_is_touched(compute, tied):
    with patch(model := build_preset(tied, torch.float16)):
        with pytest.raises(ValueError, match="float16 is not covered in training"):
            compute(model).float().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("compute", [logits, hidden_states])
def test_without_the_refusal_small_gradients_vanish_in_fp16(compute, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(decoder, "guarded_backward", lambda output, *_: output)
    largest = []
    for dtype in (torch.float16, torch.float32):
        with patch(model := build_preset("tiny-llama", dtype)):
            (compute(model).float().square().mean() * 1e-6).backward()
        largest.append(max(p.grad.abs().max() for p in model.model.layers.parameters()))
    assert largest[0] == 0 < largest[1]


@pytest.mark.parametrize("compute", [scored_ids, logits, hidden_states])
def test_fp16_scores_without_gradients(compute):
    model = build_preset("tiny-qwen3", torch.float16)
    with patch(model):
        with torch.no_grad():
            expected = compute(model)
        model.requires_grad_(False)
        assert torch.isfinite(expected).all() and torch.equal(compute(model), expected)


@pytest.fixture
def defaults():
    """Torch's defaults, put back after the test."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("dtype, device", [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_other_defaults_are_named_with_what_to_do(dtype, device, defaults):
    model = build_preset("tiny-qwen3")
    with patch(model) as session:
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=8)
        ids = torch.tensor(IDS)
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        for compute in (
            lambda: token_logprobs(model, ids, prompt_lengths=[1]),
            lambda: model(input_ids=ids),
            lambda: engine.generate(IDS, SamplingParams()),
            session.verify,
        ):
            with pytest.raises(ValueError, match=rf"{dtype} on {device}; .*set_default_dtype\("):
                compute()
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        session.verify()
        assert engine.generate(IDS, SamplingParams())


def test_without_the_check_another_default_device_ends_within_torch(model, defaults, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(patching, "verify_defaults", lambda: None)
    with patch(model):
        torch.set_default_device("meta")
        with pytest.raises(RuntimeError, match="meta tensor"):
            rolled_out(model)


def test_a_model_built_and_patched_under_other_defaults_is_covered(defaults):
    expected = build_preset("tiny-qwen3", torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    model = build_preset("tiny-qwen3", torch.bfloat16)
    session = patch(model)
    torch.set_default_dtype(torch.float32)
    model.load_state_dict(expected.state_dict())
    with session, patch(expected):
        session.verify()
        assert torch.equal(scored_ids(model), scored_ids(expected))


@pytest.mark.thorough
def test_torch_compile_leaves_a_patched_model_as_it_is(model):
    with patch(model), torch.no_grad():
        ids = torch.tensor(tokens(model))
        expected = {"logits": model(input_ids=ids).logits, "scores": scores(model)}
        compiled = torch.compile(model)
        found = {"logits": compiled(input_ids=ids).logits, "scores": torch.compile(scores)(model)}
        assert first_difference(found, expected) is None


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_part_that_is_compiled_by_itself_has_other_bits(model):
    """Negative control: the decoder lets no compiler in, the call of a part does."""
    with patch(model), torch.no_grad():
        # A norm compiled by itself has the same bits on some processors.
        mlp, x = model.model.layers[0].mlp, 3 * torch.randn(1, 21, 96)
        # Headers compiled ahead take g++ as long as all the rest, and serve this one part.
        compiled = torch.compile(mlp, options={"cpp_cache_precompile_headers": False})
        assert first_difference({"": compiled(x)}, {"": mlp(x)}) is not None


def as_module(function):
    """What Hugging Face's kernels makes of a function of transformers, where it is installed."""

    class Func(torch.nn.Module):
        def forward(self, *operands, **options):
            return func(*operands, **options)

    func = function
    return Func()


def test_a_function_that_is_a_module_is_covered_until_its_forward_is_replaced(model, monkeypatch):
    rotate = as_module(modeling_qwen3.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotate)
    with pytest.raises(UnsupportedModelError, match="apply_rotary_pos_emb was replaced"):
        patch(model)  # made here and not by the library
    written_in, forward = installed_code.written_in, type(rotate).forward
    known = lambda function: "kernels" if function is forward else written_in(function)  # noqa: E731
    monkeypatch.setattr(installed_code, "written_in", known)
    with patch(model) as session:
        session.verify()
        with strict(except_={"rotary"}):
            assert torch.isfinite(scores(model)).all()
        rotate.forward = lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)
        with pytest.raises(UnsupportedModelError, match="apply_rotary_pos_emb was replaced"):
            scores(model)
