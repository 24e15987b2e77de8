"""The engine end to end: its tokens and logprobs depend on nothing but the sample itself."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout.device import model_runner
from rl_consistency.rollout.device.device_state import DeviceState
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import content

VOCAB = 96
EOS = 95
SHARED = list(range(1, 38))
PROMPTS = [SHARED + [40, 41], SHARED + [50], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
IDS = [11, 7, 5, 2**40]
SAMPLING = [
    SamplingParams(n=3, max_tokens=24, seed=3),
    SamplingParams(n=2, max_tokens=20, temperature=0.7, top_k=40, top_p=0.9, seed=3),
    SamplingParams(n=3, max_tokens=24, temperature=1.4, min_p=0.05, stop_token_ids=(17,), seed=9),
    SamplingParams(n=1, max_tokens=24, temperature=0.0),
]


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def tiny_model(dtype):
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # outliers and unequal channels: sums whose order shows
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
                parameter[:, ::9] *= 4.0
    return model.to(dtype).eval()


@pytest.fixture
def session():
    model = tiny_model(torch.float32)  # the session itself holds no strong reference
    with patch(model) as live:
        yield live


def engine_of(model, **settings):
    return RolloutEngine(model, eos_token_id=EOS, **{"kv_block_size": 4, **settings})


def run(engine):
    return engine.generate(PROMPTS, SAMPLING, prompt_ids=IDS)


def logprob_bytes(completions):
    return [c.token_logprobs.numpy().tobytes() for c in completions]


def training_logprobs(model, completions):
    scored = token_logprobs(
        model,
        [PROMPTS[c.prompt_index] + c.token_ids for c in completions],
        prompt_lengths=[len(PROMPTS[c.prompt_index]) for c in completions],
        sampling=[SAMPLING[c.prompt_index] for c in completions],
    )
    return [part.detach() for part in scored.split()]


@pytest.mark.parametrize(
    ("family", "option"),
    [("mistral", {"sliding_window": 9}), ("qwen3", {"attention_bias": True})],
    ids=["window", "biases"],
)
def test_a_window_and_biases_decode_to_the_bytes_of_training(family, option):
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES, **option)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with patch(model):
        roomy = run(engine_of(model))
        tight = run(engine_of(model, num_kv_blocks=22, prefill_chunk_size=7, max_num_seqs=3))
        recomputed = training_logprobs(model, tight)
    assert content(tight) == content(roomy)
    assert logprob_bytes(tight) == [part.numpy().tobytes() for part in recomputed]


def test_a_tiny_cache_preempts_and_a_shared_prompt_is_found(session):
    engine = engine_of(session.model, num_kv_blocks=22)
    run(engine)
    assert engine.stats.preemptions > 0
    assert engine.stats.prefix_hit_tokens > 0
    roomy = engine_of(session.model)
    run(roomy)
    # Two siblings and both samples of the second prompt find 36 tokens; the others share nothing.
    assert roomy.stats.preemptions == 0
    assert roomy.stats.prefix_hit_tokens == 4 * 36
    unshared = engine_of(session.model, enable_prefix_sharing=False)
    completions = run(unshared)
    assert (unshared.stats.preemptions, unshared.stats.prefix_hit_tokens) == (0, 0)
    assert unshared.stats.prefill_tokens == sum(len(PROMPTS[c.prompt_index]) for c in completions)
    assert unshared.stats.decode_tokens == sum(len(c.token_ids) for c in completions)


def test_completions_come_in_order_and_end_for_a_reason(session):
    completions = run(engine_of(session.model))
    names = [(c.prompt_index, c.sample_index) for c in completions]
    assert names == [(p, s) for p, params in enumerate(SAMPLING) for s in range(params.n)]
    for c in completions:
        params = SAMPLING[c.prompt_index]
        stops = {EOS, *params.stop_token_ids}
        assert c.token_logprobs.dtype == torch.float32
        assert len(c.token_logprobs) == len(c.token_ids) <= params.max_tokens
        assert not stops & set(c.token_ids[:-1])
        if c.finish_reason == "stop":
            assert c.token_ids[-1] in stops
        else:
            assert len(c.token_ids) == params.max_tokens


def test_eos_stops_unless_ignored_and_may_be_several_or_none(session):
    model, params = session.model, SamplingParams(n=4, max_tokens=30, seed=1)
    free = RolloutEngine(model, eos_token_id=None).generate([SHARED], params)
    assert {c.finish_reason for c in free} == {"length"}
    eos = [free[0].token_ids[3], free[1].token_ids[5]]
    stopped = RolloutEngine(model, eos_token_id=eos).generate([SHARED], params)
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in eos]
        assert cut.token_ids == (whole.token_ids[: ends[0] + 1] if ends else whole.token_ids)
    assert stopped[0].finish_reason == "stop"
    ignoring = SamplingParams(n=4, max_tokens=30, seed=1, ignore_eos=True)
    ignored = RolloutEngine(model, eos_token_id=eos).generate([SHARED], ignoring)
    assert content(ignored) == content(free)


def test_changed_weights_are_used_at_once_and_no_cached_key_survives(session):
    engine = engine_of(session.model)
    before = content(run(engine))
    with torch.no_grad():
        session.model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
    after = run(engine)
    assert content(after) != before
    assert content(after) == content(run(engine_of(session.model)))
    recomputed = training_logprobs(session.model, after)
    assert logprob_bytes(after) == [part.numpy().tobytes() for part in recomputed]


def test_progress_counts_every_token_and_sample(session):
    calls = []
    engine = engine_of(session.model, max_num_seqs=2)
    completions = engine.generate(PROMPTS, SAMPLING, progress=lambda *counts: calls.append(counts))
    assert calls == sorted(calls) and len(calls) == engine.stats.steps + 1  # the last report
    assert calls[-1] == (sum(len(c.token_ids) for c in completions), 9, 9)


def test_no_prompts_give_no_completions(session):
    assert engine_of(session.model).generate([], SamplingParams()) == []


# Negative controls: each breaks one promise and must be seen by the checks above.


def test_a_random_stream_keyed_by_batch_row_is_caught(session, monkeypatch):
    def by_slot(self, sequence):
        kept = sequence.prompt_id, sequence.sample_index
        assert sequence.slot is not None
        sequence.prompt_id = sequence.sample_index = sequence.slot
        admit(self, sequence)
        sequence.prompt_id, sequence.sample_index = kept

    admit = DeviceState.admit
    monkeypatch.setattr(DeviceState, "admit", by_slot)
    one, many = (content(run(engine_of(session.model, max_num_seqs=n))) for n in (1, 32))
    assert one != many


def test_a_stock_decode_is_caught(session, monkeypatch):
    def stock_hidden_states(model, input_ids, position_ids, paged, wanted):
        """Hugging Face's own forward over each chunk, its cache rebuilt from the known tokens."""
        rows = []
        new = list(input_ids.split([chunk.length for chunk in current_chunks]))
        with session.stock():
            for chunk, own in zip(current_chunks, new, strict=True):
                past = torch.tensor([chunk.sequence.token_ids[: chunk.start]])
                cache = model.model(past).past_key_values if chunk.start else None
                out = model.model(own[None], past_key_values=cache, use_cache=True)
                rows.append(out.last_hidden_state[0])
        return torch.cat(rows)[wanted]

    current_chunks = []
    launch = model_runner.ModelRunner.launch

    def remember(self, chunks):
        current_chunks[:] = chunks
        return launch(self, chunks)

    monkeypatch.setattr(model_runner.ModelRunner, "launch", remember)
    monkeypatch.setattr(model_runner, "paged_hidden_states", stock_hidden_states)
    completions = run(engine_of(session.model))
    recomputed = training_logprobs(session.model, completions)
    for sampled, again in zip(completions, recomputed, strict=True):
        torch.testing.assert_close(sampled.token_logprobs, again, atol=1e-3, rtol=0)
    assert logprob_bytes(completions) != [part.numpy().tobytes() for part in recomputed]


def test_logprobs_rounded_to_bf16_are_caught(session, monkeypatch):
    exact = model_runner.next_token_logits
    monkeypatch.setattr(
        model_runner, "next_token_logits", lambda *args: exact(*args).bfloat16().float()
    )
    completions = run(engine_of(session.model))
    sampled = [c for c in completions if c.prompt_index == 0]
    recomputed = training_logprobs(session.model, sampled)
    assert logprob_bytes(sampled) != [part.numpy().tobytes() for part in recomputed]


# Weights that are not finite.
