"""vLLM's logprobs are training's, whatever it batches, caches or replays as a graph."""

from types import SimpleNamespace

import pytest

import rl_consistency as rlc
from tests.gpu.vllm.engines import engine_of
from tests.gpu.vllm.policies import (
    Trainer,
    checkpoint,
    differing,
    mixed_prompts,
    random_prompts,
)

pytestmark = pytest.mark.gpu

WAYS = (
    "qwen3-eager",
    "qwen3-graphs",
    "qwen3_moe-graphs",
    "llama-graphs",
    "mistral-graphs",
    "qwen2-graphs",
    "qwen3-decode",
    "mistral-eager",
    "qwen3_moe-eager",
)
"""A family, and how vLLM runs its model."""

SAMPLINGS = (
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.3},
    {"min_p": 0.05},
    {"top_k": 3},
)


@pytest.fixture(scope="module", params=WAYS)
def run(request, tmp_path_factory):
    """An engine, the trainer, and a first pass over the prompts with an empty prefix cache."""
    family, graphs = request.param.rsplit("-", 1)
    folder = checkpoint(tmp_path_factory.mktemp(family) / "model", family)
    prompts = mixed_prompts()
    with engine_of(folder, graphs) as engine:
        first = engine.drawn(prompts)
        yield SimpleNamespace(
            engine=engine, trainer=Trainer.of(folder), prompts=prompts, first=first
        )


def test_logprobs_are_those_of_the_trainer(run):
    assert differing(run.first, run.trainer.scored(run.prompts, run.first)) == 0


def test_a_prefix_from_the_cache_changes_nothing(run):
    assert differing(run.engine.drawn(run.prompts), run.first) == 0
    assert run.engine.cached > 0.5 * sum(map(len, run.prompts))


def test_alone_is_as_among_others(run):
    run.engine.llm.reset_prefix_cache()
    for place in range(0, len(run.prompts), 4):
        alone = run.engine.drawn([run.prompts[place]], ids=[place])
        assert differing(alone, [run.first[place]]) == 0


def test_among_two_hundred_others(run):
    count = len(run.prompts)
    others = random_prompts("others", [16 + (37 * i) % 497 for i in range(200)])
    run.engine.llm.reset_prefix_cache()
    found = run.engine.drawn(
        others[:90] + run.prompts + others[90:],
        ids=[*range(1000, 1090), *range(count), *range(2000, 2110)],
    )
    assert differing(found[90 : 90 + count], run.first) == 0


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_distribution_is_the_trainers(run, sampling):
    found = run.engine.drawn(run.prompts, **sampling)
    assert differing(found, run.trainer.scored(run.prompts, found, **sampling)) == 0
    assert [tokens for tokens, _ in found] != [tokens for tokens, _ in run.first]


def test_requests_of_several_distributions_share_a_batch(run):
    engine, prompts = run.engine, run.prompts[:4]
    wanted = [
        engine.vllm.SamplingParams(
            max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False, seed=i,
            **{"temperature": 1.0} | sampling,
        )
        for i, sampling in enumerate(SAMPLINGS)
    ]  # fmt: skip
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = engine.llm.generate(given, wanted, use_tqdm=False)
    for prompt, sampling, each in zip(prompts, SAMPLINGS, found):
        tokens = list(each.outputs[0].token_ids)
        logprobs = [row[t].logprob for t, row in zip(tokens, each.outputs[0].logprobs)]
        drawn = [(tokens, logprobs)]
        assert differing(drawn, run.trainer.scored([prompt], drawn, **sampling)) == 0


def test_logprobs_of_the_likeliest_tokens_leave_the_drawn_ones_as_they_are(run):
    assert differing(run.engine.drawn(run.prompts[:6], logprobs=5), run.first[:6]) == 0


def test_tokens_are_those_of_our_engine(run):
    own = run.trainer.completed(run.prompts[:8], len(run.first[0][0]))
    assert differing(run.first[:8], own) == 0


def test_what_is_not_covered_is_refused(run):
    prompt, wanted = {"prompt_token_ids": [5, 6, 7]}, run.engine.vllm.SamplingParams
    for refused in ({"presence_penalty": 0.5}, {"logit_bias": {7: 3.0}}, {"prompt_logprobs": 0}):
        with pytest.raises(ValueError, match="rl_consistency"):
            run.engine.llm.generate([prompt], wanted(max_tokens=4, **refused), use_tqdm=False)
    assert differing(run.engine.drawn(run.prompts[:2]), run.first[:2]) == 0


def test_after_new_weights(run):
    engine, trainer = run.engine, run.trainer
    old = trainer.weights()
    trainer.move(seed=1)
    engine.load(trainer.weights())
    try:
        (digest,) = engine.llm.apply_model(lambda model: model.digest())
        assert digest == rlc.model_digest(trainer.model)
        found = engine.drawn(run.prompts)
        assert differing(found, trainer.scored(run.prompts, found)) == 0
        # A control: the new weights give other numbers.
        assert differing(found, run.first) > 0.9 * sum(len(tokens) for tokens, _ in found)
    finally:
        engine.load(old)
        for (_, weight), parameter in zip(old, trainer.model.parameters()):
            parameter.data.copy_(weight)
