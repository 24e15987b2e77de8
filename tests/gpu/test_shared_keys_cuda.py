"""The engine on a GPU with groups whose prompts are read once: the bytes of every other way."""

from dataclasses import replace

import pytest
import torch

from rl_consistency.kernels.attention.layout import SharedRun
from rl_consistency.kernels.core.device import has_wgmma
from rl_consistency.models.patch import patch
from rl_consistency.rollout.device import device_state
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import Recalling

pytestmark = pytest.mark.gpu

SYSTEM = [(11 * n) % 331 for n in range(140)]
PROMPTS = [
    [*(SYSTEM if i % 2 else ()), *((7 * i + 3 * n) % 331 for n in range(n))]
    for i, n in enumerate((300, 129, 260, 20, 5, 150))
]
SAMPLING = SamplingParams(n=8, temperature=0.8, max_tokens=40, seed=3)
SETTINGS = {
    "not shared": {"enable_prefix_sharing": False},
    "op by op": {"cuda_graphs": False},
    "one at a time": {"max_num_seqs": 1},
    "preempted": {"num_kv_blocks": 110},
    "chunked prefill": {"prefill_chunk_size": 50, "max_batch_tokens": 100},
    "another size of blocks": {"kv_block_size": 48},
}


@pytest.fixture(scope="module", params=[(torch.bfloat16, 64, 4), (torch.float16, 128, 6)], ids=str)
def model(request, small_model):
    if not has_wgmma(torch.device("cuda")):
        pytest.skip("needs sm_90")
    dtype, head_dim, heads = request.param
    model = small_model(dtype, head_dim=head_dim, num_attention_heads=heads)
    with patch(model):
        yield model


def engine_of(model, **settings):
    return RolloutEngine(model, eos_token_id=1, **{"num_kv_blocks": 1200} | settings)


def as_bytes(completions):
    return [(c.token_ids, c.token_logprobs.view(torch.int32).tolist()) for c in completions]


def shapes(engine):
    return list(engine._runner.decode_graphs._captured)


@pytest.fixture(scope="module")
def expected(model):
    engine = engine_of(model)
    found = as_bytes(engine.generate(PROMPTS, SAMPLING))
    assert any(shape.shared for shape in shapes(engine))
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_groups_read_once_give_the_bytes_of_every_other_way(model, expected, setting):
    engine = engine_of(model, **SETTINGS[setting])
    assert as_bytes(engine.generate(PROMPTS, SAMPLING)) == expected
    assert (engine.stats.preemptions > 0) == (setting == "preempted")


def test_drafts_of_groups_give_the_same_bytes(model, expected):
    texts = [[*PROMPTS[i // SAMPLING.n], *tokens] for i, (tokens, _) in enumerate(expected)]
    drafted = replace(SAMPLING, speculation=3)
    for shares in (True, False):
        engine = engine_of(model, enable_prefix_sharing=shares, drafter=Recalling(texts))
        assert as_bytes(engine.generate(PROMPTS, drafted)) == expected
        assert engine.stats.accepted_tokens > 0
        assert any(shape.shared and shape.width > 1 for shape in shapes(engine)) == shares


def test_samples_that_the_prefix_cache_leaves_one_token_of_read_their_own_prompt(model):
    """Their first step is a decode step. 257 tokens are whole blocks of 16 and one more."""
    prompts = [[(7 * i + 3 * n + 1) % 331 for n in range(257)] for i in range(3)]
    sampling = replace(SAMPLING, n=4)
    wanted = as_bytes(engine_of(model, cuda_graphs=False).generate(prompts, sampling))
    engine = engine_of(model)
    for _ in range(2):
        assert as_bytes(engine.generate(prompts, sampling)) == wanted
    assert any(shape.shared for shape in shapes(engine))


def test_graphs_of_groups_are_captured_ahead_of_time(model, expected):
    engine = engine_of(model, max_num_seqs=8)
    engine.warm_up(SAMPLING, batch_sizes=[8, 1])
    assert [(shape.rows, shape.shared) for shape in shapes(engine)] == [(8, True), (1, False)]
    assert as_bytes(engine.generate(PROMPTS, SAMPLING)) == expected


def test_a_block_too_many_is_noticed(model, expected, monkeypatch):
    """Negative control."""
    arranged = device_state.arranged

    def too_long(*given):
        found = arranged(*given)
        return found and (found[0], [SharedRun(r.first, r.count, r.keys + 128) for r in found[1]])

    monkeypatch.setattr(device_state, "arranged", too_long)
    assert as_bytes(engine_of(model).generate(PROMPTS, SAMPLING)) != expected
