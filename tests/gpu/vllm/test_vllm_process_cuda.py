"""vLLM's engine in a process of its own: too few blocks for its requests, and long contexts."""

from types import SimpleNamespace

import pytest

from tests.gpu.vllm.engines import engine_of
from tests.gpu.vllm.policies import Trainer, checkpoint, differing, random_prompts

pytestmark = pytest.mark.gpu

BLOCKS = 1300
"""Of 16 tokens: one sequence of 16,384 fits, and a few short ones."""


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def run(request, tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp(request.param) / "model", request.param)
    with engine_of(
        folder,
        "graphs",
        own_process=True,
        max_model_len=16384,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        num_gpu_blocks_override=BLOCKS,
        disable_log_stats=False,
    ) as engine:
        yield SimpleNamespace(engine=engine, trainer=Trainer.of(folder))


def preemptions(engine):
    (found,) = (m for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")
    return found.value


def test_logprobs_of_another_process_are_the_trainers(run):
    prompts = random_prompts("process", (3, 17, 64, 200, 1000, 2100))
    found = run.engine.drawn(prompts)
    assert differing(found, run.trainer.scored(prompts, found)) == 0
    assert differing(run.engine.drawn(prompts), found) == 0


def test_sequences_that_were_preempted_and_computed_again(run):
    prompts = random_prompts("preempted", [150 + 7 * i for i in range(60)])
    before = preemptions(run.engine)
    found = run.engine.drawn(prompts, new=160)
    assert preemptions(run.engine) > before
    assert differing(found, run.trainer.scored(prompts, found)) == 0


def test_contexts_of_sixteen_thousand_tokens(run):
    prompts = random_prompts("long contexts", (16_300, 5, 16_000, 300))
    found = run.engine.drawn(prompts, new=40)
    assert differing(found, run.trainer.scored(prompts, found)) == 0
    # The long ones again: out of the cache as far as it still holds them.
    assert differing(run.engine.drawn([prompts[2]], new=40, ids=[2]), [found[2]]) == 0
