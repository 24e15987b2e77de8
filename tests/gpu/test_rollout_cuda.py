"""The engine on a GPU: its logprobs are training's, whatever else is in the batch."""

import warnings

import pytest
import torch

from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.sampling.op import inverse_cdf
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.drift import compare_logprobs
from rl_consistency.rollout.block_manager import GPU_CACHE_SHARE
from rl_consistency.rollout.device import ragged_graphs
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 3 * n) % 331 for i in range(n)] for n in (1, 5, 33, 64, 130, 17, 3)]
SAMPLINGS = {
    "plain": SamplingParams(n=2, max_tokens=40, seed=3),
    "warm": SamplingParams(n=2, temperature=0.7, max_tokens=40, seed=3),
    "truncated": SamplingParams(
        n=2, temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, max_tokens=40, seed=3
    ),
    "greedy": SamplingParams(n=2, temperature=0.0, greedy_logprobs="full", max_tokens=40),
}


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def model(request, small_model):
    model = small_model(request.param)
    with patch(model):
        yield model


def engine_of(model, **settings):
    return RolloutEngine(model, eos_token_id=1, **{"num_kv_blocks": 400} | settings)


def generated(model, sampling, prompts=PROMPTS, **settings):
    return engine_of(model, **settings).generate(prompts, sampling)


def rescored(model, completions, sampling):
    prompts = [PROMPTS[c.prompt_index] for c in completions]
    with torch.no_grad():
        return token_logprobs(
            model,
            [[*p, *c.token_ids] for p, c in zip(prompts, completions)],
            prompt_lengths=[len(p) for p in prompts],
            sampling=sampling,
            check_support=False,
        ).split()


def as_bytes(completions):
    return [(c.token_ids, c.token_logprobs.view(torch.int32).tolist()) for c in completions]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rollout_logprobs_are_training_logprobs(model, name):
    completions = generated(model, SAMPLINGS[name])
    rollout = [c.token_logprobs for c in completions]
    assert all(t.device.type == "cpu" for t in rollout)
    report = compare_logprobs(rollout, rescored(model, completions, SAMPLINGS[name]))
    assert report.passed and report.max_ulp == 0 and report.tokens > 100


def test_greedy_decoding_takes_the_lowest_of_equal_maxima(model):
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    assert as_bytes(generated(model, greedy)) == as_bytes(generated(model, greedy, max_num_seqs=2))


def test_greedy_tokens_have_the_logprobs_of_the_whole_softmax(model):
    zero = SamplingParams(temperature=0.0, max_tokens=20)
    full = SamplingParams(temperature=0.0, max_tokens=20, greedy_logprobs="full")
    found = generated(model, full)
    assert as_bytes(found) == as_bytes(generated(model, full, cuda_graphs=False))
    sampled = [SamplingParams(max_tokens=20), zero, full] * 3
    mixed = generated(model, sampled[: len(PROMPTS)])
    assert as_bytes(mixed)[2::3] == as_bytes(found)[2::3]
    assert as_bytes(mixed)[1::3] == as_bytes(generated(model, zero))[1::3]
    assert [c.token_ids for c in found] == [c.token_ids for c in generated(model, zero)]
    scored = rescored(model, found, SamplingParams())
    assert all(torch.equal(c.token_logprobs, s.cpu()) for c, s in zip(found, scored))
    assert not any((c.token_logprobs == 0).all() for c in found)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_change_for_some_steps_ends_the_rollout(small_model, through_data):
    with patch(model := small_model()):
        attention, calls = model.model.layers[0].self_attn, []
        weight, scaling = attention.v_proj.weight, attention.scaling
        kept = weight.data.clone()

        def progress(*_):
            calls.append(1)
            if len(calls) == 3:
                weight.data.mul_(1.5) if through_data else setattr(attention, "scaling", 0.9)
            elif len(calls) == 33:
                weight.data.copy_(kept) if through_data else setattr(attention, "scaling", scaling)

        engine, sampling = engine_of(model), SamplingParams(max_tokens=60, ignore_eos=True, seed=3)
        expected = as_bytes(engine.generate(PROMPTS, sampling))
        with pytest.raises(ConsistencyError, match="during generation.*seen in step"):
            engine.generate(PROMPTS, sampling, progress=progress)
        assert 3 <= len(calls) < 33
        weight.data.copy_(kept)
        attention.scaling = scaling
        assert as_bytes(engine.generate(PROMPTS, sampling)) == expected


def test_a_draw_is_the_draw_of_the_cpu():
    generator = torch.Generator().manual_seed(5)
    probabilities = torch.randn(64, 10_000, generator=generator).softmax(dim=1)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    drawn = inverse_cdf(probabilities.cuda(), uniforms.cuda())
    assert torch.equal(drawn.cpu(), inverse_cdf(probabilities, uniforms))


def test_a_decode_step_hardly_waits_for_the_device(monkeypatch, small_model):
    """Decoding is bound by launches: each wait empties the queue."""
    waits = []
    monkeypatch.setattr("rl_consistency.rollout.weights._MEAN_STEPS", 10**6)  # a digest waits
    with patch(model := small_model()):
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=400)
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        engine.generate(PROMPTS, sampling)  # compiles and allocates
        real = engine.step

        def step():
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    sampled = real()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waits.append([str(w.message) for w in seen if "synchroniz" in str(w.message)])
            return sampled

        monkeypatch.setattr(engine, "step", step)
        engine.generate(PROMPTS, sampling)
    # The tokens of a step are read behind an event, which is no wait for the whole device; the last
    # step hands the samples over.
    assert len(waits) > 8 and not any(waits[3:-1]), [w for w in waits if w]


def test_the_default_cache_leaves_room_on_the_gpu(small_model, monkeypatch):
    # What is free changes with whatever else runs on the device; a quarter of it stays.
    stays = torch.cuda.mem_get_info()[0] // 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (stays, 4 * stays))
    with patch(model := small_model()):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        # Other tests of this process leave holes between what they still hold.
        free = stays + torch.cuda.memory_reserved() - before
        engine = RolloutEngine(model, eos_token_id=None, max_num_seqs=10**5, kv_block_size=4096)
        taken = torch.cuda.memory_allocated() - before
        del engine
        torch.cuda.empty_cache()
    share = GPU_CACHE_SHARE * free
    assert 0.95 * share < taken < share + 2**26  # the tables of so many samples


def test_a_cache_larger_than_the_gpu_is_refused_with_its_size(small_model):
    with (
        patch(model := small_model()),
        pytest.raises(ValueError, match=r"no room on cuda:0 .* GiB"),
    ):
        RolloutEngine(model, eos_token_id=None, num_kv_blocks=1 << 28)


def test_a_model_moved_to_the_gpu_after_its_engine_is_refused(small_model):
    with patch(model := small_model().cpu()):
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=40)
        model.cuda()
        with pytest.raises(ValueError, match="build the RolloutEngine after"):
            engine.generate([[1, 2]], SamplingParams())


def test_nothing_computed_with_a_withdrawn_product_is_used_again(
    small_model, monkeypatch, fresh_certificates
):
    monkeypatch.setattr(audit, "AUDIT_EVERY", 1)
    monkeypatch.setattr(cublaslt, "prefers_library", lambda rows, *rest: rows > 1)
    monkeypatch.setattr(ragged_graphs, "AHEAD", (1,))  # replays are not audited
    library_product = cublaslt.library_product
    sampling, prompts = SAMPLINGS["plain"], PROMPTS[:4]
    with patch(model := small_model()):
        engine = engine_of(model)
        expected = as_bytes(engine.generate(prompts, sampling))
        hits, calls = engine.stats.prefix_hit_tokens, audit.schedule_audit().calls
        with monkeypatch.context() as broken:
            broken.setattr(
                cublaslt, "library_product", lambda *given: 1.01 * library_product(*given)
            )
            with pytest.warns(UserWarning, match="withdrawn: nt/bf16/"):
                assert as_bytes(engine.generate(prompts, sampling)) != expected
        assert engine.stats.prefix_hit_tokens > hits
        assert audit.schedule_audit().calls > calls > 0
        assert len(engine._runner.decode_graphs) > 0
        engine.warm_up(sampling, batch_sizes=[])
        assert len(engine._runner.decode_graphs) == 0
        assert as_bytes(engine.generate(prompts, sampling)) == expected
        assert engine.stats.prefix_hit_tokens == hits


def test_a_nan_in_the_weights_is_reported_by_name(small_model):
    with patch(model := small_model()):
        with torch.no_grad():
            model.model.norm.weight[0] = torch.nan
        with pytest.raises(ConsistencyError, match="prompt 0, sample 0, position 2: .*not finite"):
            generated(model, SamplingParams(), [[1, 2]])
