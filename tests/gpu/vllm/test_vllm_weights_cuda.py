"""New weights and sleep, under graphs: what vLLM draws after them is the trainer's."""

from types import SimpleNamespace

import pytest

import rl_consistency as rlc
from rl_consistency.numerics.errors import ConsistencyError
from tests.gpu.vllm.engines import engine_of
from tests.gpu.vllm.policies import Trainer, checkpoint, differing, random_prompts

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts("weights", (5, 40, 130, 300, 600, 71))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    # vLLM allows one engine that sleeps in a process: experts and tied weights are in one model.
    folder = checkpoint(tmp_path_factory.mktemp("weights"), "qwen3_moe", tie_word_embeddings=True)
    with engine_of(folder, "graphs", enable_sleep_mode=True) as engine:
        yield SimpleNamespace(engine=engine, trainer=Trainer.of(folder))


def on_model(run, function):
    (found,) = run.engine.llm.apply_model(function)
    return found


def require_equal(run):
    assert on_model(run, lambda model: model.digest()) == rlc.model_digest(run.trainer.model)
    found = run.engine.drawn(PROMPTS)
    assert differing(found, run.trainer.scored(PROMPTS, found)) == 0


def test_weights_that_arrive_one_by_one(run):
    run.trainer.move(seed=1)

    def load(model):
        for named in run.trainer.weights():
            model.load_weights([named])

    on_model(run, load)
    run.engine.llm.reset_prefix_cache()
    require_equal(run)


def test_weights_of_vllms_layerwise_reload(run):
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    run.trainer.move(seed=2)
    config = run.engine.llm.llm_engine.model_config

    def reload(model):
        initialize_layerwise_reload(model)
        model.load_weights(iter(run.trainer.weights()))
        finalize_layerwise_reload(model, config)

    on_model(run, reload)
    run.engine.llm.reset_prefix_cache()
    require_equal(run)


def test_asleep_and_awake(run):
    run.engine.llm.sleep(level=1)
    run.engine.llm.wake_up()
    require_equal(run)


def test_asleep_without_weights(run):
    run.engine.llm.sleep(level=2)
    run.engine.llm.wake_up()
    with pytest.raises(ConsistencyError, match="has no weights"):
        on_model(run, lambda model: model.digest())
    run.trainer.move(seed=3)
    run.engine.load(run.trainer.weights())
    require_equal(run)


def test_weights_that_are_refused_leave_the_others_as_they_are(run):
    name, weight = run.trainer.weights()[1]
    for wrong in ((f"{name}x", weight), (name, weight[:1]), (name, weight.float())):
        with pytest.raises(ValueError, match="weights: "):
            on_model(run, lambda model, wrong=wrong: model.load_weights([wrong]))
    run.engine.load(run.trainer.weights())
    require_equal(run)


def test_a_reload_that_is_not_finished(run):
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    # The last test of an engine: after an error in a step it cannot go on.
    on_model(run, lambda model: initialize_layerwise_reload(model))
    with pytest.raises(ConsistencyError, match="on the meta device"):
        run.engine.drawn(PROMPTS[:1])
