"""Mixtures of experts in the engine: rows that fail alone, padding, and weights that change."""

import numpy as np
import pytest
import torch

from rl_consistency.kernels.attention.layout import CapturedPagedAttention, SequenceTables
from rl_consistency.models import moe
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.models.snapshot import Snapshot
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.failures import FailedRequestsError
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.step_watch import StepWatch
from rl_consistency.rollout.weights import _weights, model_digest
from rl_consistency.verify.presets import build_preset
from tests.rollout.device.launches import uncaptured
from tests.rollout.engine.engines import Recalling, content, engine_of

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 59, 11, 12], list(range(20, 33))]
SAMPLING = SamplingParams(n=2, max_tokens=6, seed=4)
SPARSE = ("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral")


@pytest.fixture(
    params=[
        SPARSE[1],
        *(pytest.param(s, marks=pytest.mark.thorough) for s in (SPARSE[0], SPARSE[2])),
    ]
)
def model(request):
    with patch(built := build_preset(request.param)):
        yield built


@torch.no_grad()
def other_experts(model, completions):
    """Of each completion, how many of its tokens met other experts in training."""
    sequences = [[*PROMPTS[c.prompt_index], *c.token_ids] for c in completions]
    lengths = [len(PROMPTS[c.prompt_index]) for c in completions]
    scored = token_logprobs(model, sequences, prompt_lengths=lengths)
    parts = scored.routing.split(scored.lengths)
    return [int((c.routing != own).sum()) for c, own in zip(completions, parts, strict=True)]


@pytest.mark.parametrize("stock", [set(), {"router"}], ids=["canonical", "stock router"])
def test_a_completion_names_the_experts_that_training_finds(model, stock):
    """Of prompts in parts, of drafts accepted and refused; and with another router it does not."""
    with strict(except_=stock):
        plain = engine_of(model).generate(PROMPTS, SAMPLING)
        assert other_experts(model, plain) == [0] * len(plain)
        texts = [[*PROMPTS[c.prompt_index], *c.token_ids] for c in plain]
        settings = {"max_batch_tokens": 8, "drafter": Recalling(texts)}
        params = SamplingParams(n=2, max_tokens=6, seed=4, speculation=3)
        drafted = engine_of(model, **settings).generate(PROMPTS, params)
        assert other_experts(model, drafted) == [0] * len(drafted)
        router = model.model.layers[1].mlp.gate
        with torch.no_grad():
            router.weight.neg_()
        assert min(other_experts(model, plain)) > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_router_logits_that_are_not_finite_fail_their_own_request(model, value):
    expected = content(engine_of(model).generate(PROMPTS, SAMPLING))
    unseen = {(p, s): c for (p, s), c in expected.items() if p != 2 and 59 not in c[0]}
    assert len(unseen) >= 4
    with torch.no_grad():
        model.model.embed_tokens.weight[59] = value
    with pytest.raises(FailedRequestsError, match="prompt 2, sample 0, position 5: the model gave"):
        engine_of(model).generate(PROMPTS, SAMPLING)
    try:
        engine_of(model).generate(PROMPTS, SAMPLING)
    except FailedRequestsError as error:
        found = content(error.completions)
        assert {c.prompt_index for c in error.failed} >= {2}
    assert {key: found[key] for key in unseen} == unseen


@pytest.mark.parametrize("name", ["gate.weight", "experts.gate_up_proj", "experts.down_proj"])
def test_weights_of_the_block_written_during_generation_are_seen(name):
    with patch(model := build_preset("tiny-olmoe")):
        engine = engine_of(model)
        digest = model_digest(model)
        engine.submit(PROMPTS, SAMPLING, weights_digest=digest)
        engine.step()
        parameter = model.get_parameter(f"model.layers.1.mlp.{name}")
        with torch.no_grad():
            parameter.view(-1)[3] += 0.25
        assert model_digest(model) != digest
        with pytest.raises(ConsistencyError, match="the weights were changed during generation"):
            while engine.has_unfinished:
                engine.step()


def test_the_digest_and_the_watch_cover_buffers_that_a_router_may_read():
    with patch(model := build_preset("tiny-olmoe")):
        engine, before = engine_of(model), model_digest(model)
        model.model.layers[1].mlp.gate.register_buffer("bias", bias := torch.ones(8))
        with_bias = model_digest(model)
        bias.data[3] = 2.0  # which leaves no version behind
        assert len({before, with_bias, model_digest(model)}) == 3
        watch = StepWatch(Snapshot(model), _weights(model))
        assert watch.look() is None
        bias[3] = 3.0
        assert watch.look() == ("model.layers.1.mlp.gate.bias was written in place", True)
        with pytest.raises(UnsupportedModelError, match="gate .* has buffers {'bias'"):
            engine.generate(PROMPTS, SAMPLING)


def test_rotary_frequencies_are_no_weights():
    """They come from the config, whatever a cast has made of the buffer."""
    with patch(model := build_preset("tiny-olmoe")):
        before = model_digest(model)
        model.model.rotary_emb.inv_freq.mul_(2.0)
        assert model_digest(model) == before


def test_cached_keys_are_dropped_when_a_router_learns():
    """An update in place between two rollouts: the second has the bytes of a fresh engine."""
    with patch(model := build_preset("tiny-qwen3-moe")):
        engine = engine_of(model)
        before = content(engine.generate(PROMPTS, SAMPLING))
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight.mul_(-1.0)
        after = content(engine.generate(PROMPTS, SAMPLING))
        assert after == content(engine_of(model).generate(PROMPTS, SAMPLING)) != before


def with_graphs(model, **settings):
    """An engine whose captured calls run on the CPU."""
    engine = engine_of(model, **settings)
    uncaptured(engine._runner)
    return engine


@pytest.fixture
def routed(monkeypatch):
    """Of each call of the experts in a captured step: rows of tokens, and rows of zeros."""
    seen, run = [], moe.experts

    def watched(x, ids, weights, gate_up, down, layout, **options):
        out = run(x, ids, weights, gate_up, down, layout, **options)
        if isinstance(layout, CapturedPagedAttention):
            empty = int((out == 0).all(dim=1).sum())
            seen.append((len(x), int(layout.numbers.token_len.sum()), empty))
        return out

    monkeypatch.setattr(moe, "experts", watched)
    return seen


def test_the_padding_of_a_graph_reaches_no_expert_and_moves_no_bit(model, routed):
    three = PROMPTS[:3]  # six sequences in a bucket of eight, fewer when some have ended
    params = SamplingParams(n=2, max_tokens=5, seed=4, speculation=3)
    expected = content(engine_of(model).generate(three, params))
    assert not routed
    texts = [[*three[p], *tokens] for (p, _), (tokens, *_) in expected.items()]
    engine = with_graphs(model, drafter=Recalling(texts))
    assert content(engine.generate(three, params)) == expected
    assert any(tokens < rows for rows, tokens, _ in routed)
    assert all(empty == rows - tokens for rows, tokens, empty in routed)


def test_padding_that_counts_as_a_token_is_routed(model, routed, monkeypatch):
    """Negative control."""
    expected = content(engine_of(model).generate(PROMPTS[:3], SAMPLING))
    monkeypatch.setattr(SequenceTables, "tokens", property(lambda self: self.query_len))
    assert content(with_graphs(model).generate(PROMPTS[:3], SAMPLING)) == expected
    assert any(empty < rows - tokens for rows, tokens, empty in routed)
