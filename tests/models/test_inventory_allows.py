"""What the inventory lets pass: hooks that are run, and what no forward reads."""

import pytest
import torch

from rl_consistency.models import patch as patching
from rl_consistency.models.inventory import faults
from rl_consistency.models.patch import patch
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.parity.digest import first_difference
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.probe import probe_tokens


@pytest.fixture
def model():
    return build_preset("tiny-qwen3")


def tokens(model, *lengths):
    return probe_tokens(lengths or (21,), model.config.vocab_size)


def scores(model):
    return token_logprobs(model, tokens(model), prompt_lengths=[1]).logprobs.detach()


@torch.no_grad()
def stock_scores(model):
    ids = torch.tensor(tokens(model))
    logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return logprobs[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def rolled_out(model, **settings):
    engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=32, **settings)
    return engine.generate(tokens(model, 9, 17), SamplingParams(n=2, max_tokens=6))


def halved(module, given, output):
    if isinstance(output, torch.Tensor):
        return output * 0.5
    if isinstance(output, tuple):
        return (output[0] * 0.5, *output[1:])
    return type(output)(last_hidden_state=output.last_hidden_state * 0.5)


ALLOWED = (
    *(
        "model.embed_tokens",
        "model.layers.0",
        "model.norm",
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
    ),
    *(
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_norm",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.up_proj",
    ),
    *("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"),
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


def test_a_hook_on_the_embedding_sees_three_dimensions(model):
    shapes = []
    model.model.embed_tokens.register_forward_hook(lambda m, given, y: shapes.append(y.shape))
    with patch(model):
        scores(model)
    assert shapes == [(1, 32, model.config.hidden_size)]


def train_mode(model):
    model.train()


def saved(model):
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.use_cache = False
    model.config.pad_token_id = 10**6


def annotated(model):
    model.model.norm.note = "mine"
    model.generate = lambda *_: None


@pytest.mark.parametrize("change", [train_mode, saved, annotated])
def test_what_no_forward_reads_may_be_changed(change, model):
    with patch(model) as session:
        before = scores(model)
        change(model)
        assert first_difference({"": scores(model)}, {"": before}) is None
        session.verify()
    change(model)
    with patch(model) as session:
        session.verify()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_a_model_that_was_cast_is_what_its_config_makes(preset, dtype):
    model = build_preset(preset)
    assert faults(model) == []
    assert faults(model.to(dtype)) == []
    assert faults(model.float()) == []


def test_looking_at_a_model_draws_no_random_number(model):
    before = torch.random.get_rng_state()
    assert faults(model) == []
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_guard_looks_closer_only_after_a_change(model, monkeypatch):
    looks = []

    def counted(model, patched=False):
        looks.append(patched)
        return faults(model, patched=patched)

    monkeypatch.setattr(patching, "faults", counted)
    with patch(model):
        for _ in range(3):
            scores(model)
            model.train(not model.training)
        assert looks == [True]
        model.model.norm.register_forward_hook(lambda *_: None)
        scores(model)
        scores(model)
        assert looks == [True, True]
