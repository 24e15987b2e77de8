"""Keys of older weights in vLLM's cache, and weights that another process lends over CUDA IPC."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

import rl_consistency as rlc
from rl_consistency.integrations.vllm.weights import check_sync
from tests.gpu.vllm.engines import engine_of
from tests.gpu.vllm.policies import Trainer, checkpoint, differing, random_prompts

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts("stale", (90, 64, 200, 33))


def run_of(engine, folder):
    return SimpleNamespace(engine=engine, trainer=Trainer.of(folder))


def require_exact(run):
    """The weights are the trainer's, and so are the logprobs, computed and from the cache."""
    model = run.engine.llm.apply_model
    check_sync(model(lambda m: m.digest()), run.trainer.model, lambda: model(lambda m: m.digests()))
    for _ in range(2):
        drawn = run.engine.drawn(PROMPTS)
        assert differing(drawn, run.trainer.scored(PROMPTS, drawn)) == 0
    assert run.engine.cached > 0


@pytest.fixture(scope="module", params=("qwen3-graphs", "mistral-eager", "qwen3_moe-graphs"))
def run(request, tmp_path_factory):
    family, graphs = request.param.rsplit("-", 1)
    folder = checkpoint(tmp_path_factory.mktemp(family) / "model", family)
    with engine_of(folder, graphs) as engine:
        yield run_of(engine, folder)


def new_weights(run, seed):
    """Such that the cache is not reset."""
    run.trainer.move(seed)
    weights = run.trainer.weights()
    run.engine.llm.apply_model(lambda model: len(model.load_weights(weights)))


def test_keys_of_older_weights_give_no_number(run):
    run.engine.drawn(PROMPTS)
    new_weights(run, seed=1)
    prompts = [*random_prompts("other", [50]), *PROMPTS]
    # The first of these starts from nothing, so the step runs.
    drawn = run.engine.drawn(prompts)
    assert run.engine.cached > 0
    assert differing(drawn[:1], run.trainer.scored(prompts[:1], drawn[:1])) == 0
    for tokens, logprobs in drawn[1:]:
        assert all(map(math.isnan, logprobs))
        assert set(tokens) == {0}
    drawn = run.engine.drawn(PROMPTS)  # in a later step
    assert all(math.isnan(each) for _, logprobs in drawn for each in logprobs)
    run.engine.llm.reset_prefix_cache()
    require_exact(run)


def test_a_step_of_such_keys_alone_is_an_error(run):
    # The last test of an engine: after an error in a step it cannot go on.
    run.engine.drawn(PROMPTS)
    new_weights(run, seed=2)
    with pytest.raises(rlc.ConsistencyError, match="call reset_prefix_cache"):
        run.engine.drawn(PROMPTS)


def test_weights_over_ipc(tmp_path):
    folder = checkpoint(tmp_path / "model", "qwen2")
    options = {"own_process": True, "weight_transfer_config": {"backend": "ipc"}}
    with engine_of(folder, "graphs", **options) as engine:
        run = run_of(engine, folder)
        run.trainer.move(seed=3)
        weights = run.trainer.weights()
        gpu = str(torch.cuda.get_device_properties(0).uuid)
        engine.llm.init_weight_transfer_engine({"init_info": {}})
        engine.llm.start_weight_update()
        for name, weight in weights:
            info = {
                "names": [name],
                "dtype_names": [str(weight.dtype).removeprefix("torch.")],
                "shapes": [list(weight.shape)],
                "ipc_handles": [{gpu: reduce_tensor(weight)[1]}],
            }
            engine.llm.update_weights({"update_info": info})
        engine.llm.finish_weight_update()
        engine.llm.reset_prefix_cache()
        require_exact(run)
