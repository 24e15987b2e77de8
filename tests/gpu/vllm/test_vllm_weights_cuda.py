"""New weights in a running vLLM: by load and by its layerwise reload, after sleep, and over IPC."""

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

LENGTHS = 90, 64, 200, 33


def digests(engine):
    return engine.llm.apply_model(lambda model: model.digests())


def require_exact(run):
    """The weights are the trainer's, and so are the logprobs, computed and from the cache."""
    found = run.engine.llm.apply_model(lambda model: model.digest())
    check_sync(found, run.trainer.model, lambda: digests(run.engine))
    for _ in range(2):
        drawn = run.engine.drawn(run.prompts)
        assert differing(drawn, run.trainer.scored(run.prompts, drawn)) == 0
    assert run.engine.cached > 0


@pytest.fixture(scope="module", params=("qwen3-graphs", "mistral-eager", "qwen3_moe-graphs"))
def run(request, tmp_path_factory):
    family, graphs = request.param.rsplit("-", 1)
    folder = checkpoint(tmp_path_factory.mktemp(family) / "model", family)
    with engine_of(folder, graphs, enable_sleep_mode=True) as engine:
        trainer, prompts = Trainer.of(folder), random_prompts("sync", LENGTHS)
        yield SimpleNamespace(engine=engine, trainer=trainer, prompts=prompts)


def test_a_parameter_a_call(run):
    run.trainer.move(seed=1)
    weights = run.trainer.weights()
    run.engine.llm.apply_model(lambda model: [len(model.load_weights([each])) for each in weights])
    run.engine.llm.reset_prefix_cache()
    require_exact(run)


def test_vllms_layerwise_reload(run):
    def addresses(model):
        return [parameter.data_ptr() for parameter in model.parameters()]

    before = run.engine.llm.apply_model(addresses)
    run.trainer.move(seed=2)
    weights = iter(run.trainer.weights())
    run.engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    run.engine.llm.reset_prefix_cache()
    assert run.engine.llm.apply_model(addresses) == before
    require_exact(run)


def test_keys_of_older_weights_give_no_number(run):
    run.engine.drawn(run.prompts)
    run.trainer.move(seed=3)
    weights = run.trainer.weights()
    run.engine.llm.apply_model(lambda model: len(model.load_weights(weights)))
    # The cache was not reset. The first of these starts from nothing, so the step runs.
    prompts = [*random_prompts("other", [50]), *run.prompts]
    drawn = run.engine.drawn(prompts)
    assert differing(drawn[:1], run.trainer.scored(prompts[:1], drawn[:1])) == 0
    assert run.engine.cached > 0
    for tokens, logprobs in drawn[1:]:
        assert all(map(math.isnan, logprobs)) and set(tokens) == {0}
    drawn = run.engine.drawn(run.prompts)  # a later step
    assert all(math.isnan(each) for _, logprobs in drawn for each in logprobs)
    run.engine.llm.reset_prefix_cache()
    require_exact(run)


def test_sleep_at_both_levels(run):
    llm = run.engine.llm
    llm.sleep(level=1)
    with pytest.raises(rlc.ConsistencyError, match="while vLLM sleeps"):
        llm.apply_model(lambda model: model.digest())
    llm.wake_up()
    require_exact(run)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    with pytest.raises(rlc.ConsistencyError, match="has no weights: vLLM's sleep at level 2"):
        llm.apply_model(lambda model: model.digest())
    weights = run.trainer.weights()
    llm.apply_model(lambda model: [len(model.load_weights([each])) for each in weights])
    llm.wake_up(tags=["kv_cache"])
    require_exact(run)


def test_vllms_transfer_over_ipc(tmp_path):
    folder = checkpoint(tmp_path / "model", "qwen2")
    options = {"own_process": True, "weight_transfer_config": {"backend": "ipc"}}
    with engine_of(folder, "graphs", **options) as engine:
        trainer = Trainer.of(folder)
        run = SimpleNamespace(
            engine=engine, trainer=trainer, prompts=random_prompts("sync", LENGTHS)
        )
        trainer.move(seed=4)
        weights = trainer.weights()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        engine.llm.init_weight_transfer_engine({"init_info": {}})
        engine.llm.start_weight_update()
        for name, weight in weights:
            info = {
                "names": [name],
                "dtype_names": [str(weight.dtype).removeprefix("torch.")],
                "shapes": [list(weight.shape)],
                "ipc_handles": [{uuid: reduce_tensor(weight)[1]}],
            }
            engine.llm.update_weights({"update_info": info})
        engine.llm.finish_weight_update()
        engine.llm.reset_prefix_cache()
        require_exact(run)
