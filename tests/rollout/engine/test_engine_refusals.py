"""Bad input is refused before any work, naming the prompt and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import engine_of

VOCAB = 60


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt 1 is empty; give it"),
        ([1, VOCAB], SamplingParams(), "prompt 1 has token id 60.*vocabulary of 60"),
        ([1, -1], SamplingParams(), "prompt 1 has token id -1"),
        ([1.5, 2.0], SamplingParams(), "prompt 1 must be a list of integer"),
        ([1] * 100, SamplingParams(max_tokens=29), "prompt 1.*context of 128.*shorten"),
        ([1] * 40, SamplingParams(max_tokens=30), "prompt 1.*18 KV blocks.*num_kv_blocks"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    prompt: list[int],
    params: SamplingParams,
    message: str,
) -> None:
    engine = engine_of(model, num_kv_blocks=17)
    monkeypatch.setattr(engine, "step", lambda: pytest.fail("work was done before the check"))
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], prompt], params)


def test_the_largest_sequence_the_cache_can_hold_is_served(model: Any) -> None:
    engine = engine_of(model, num_kv_blocks=17)
    params = SamplingParams(max_tokens=29, ignore_eos=True)  # 40 + 29 - 1 = 17 * 4
    assert len(engine.generate([[1] * 40], params)[0].token_ids) == 29


def test_two_prompts_may_not_share_a_random_stream(model: Any) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match="prompt 1 has the prompt id 4 and seed 0 of prompt 0,"):
        engine.generate([[1], [2]], SamplingParams(), prompt_ids=[4, 4])


@pytest.mark.parametrize("prompt_ids", [[1], [0, -1], [0, 2**64], [0, "a"]])
def test_bad_prompt_ids_are_refused(model: Any, prompt_ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="prompt_ids"):
        engine_of(model).generate([[1], [2]], SamplingParams(), prompt_ids=prompt_ids)


def test_one_sampling_is_needed_for_each_prompt(model: Any) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1 sampling"):
        engine_of(model).generate([[1], [2]], [SamplingParams()])


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_block_size": 0},
        {"num_kv_blocks": 0},
        {"max_batch_tokens": 0},
        {"max_num_seqs": -1},
        {"prefill_chunk_size": 0},
        {"kv_block_size": 4.0},
        {"max_num_seqs": "4"},
        {"max_batch_tokens": 0.5},
    ],
)
def test_a_limit_that_is_no_integer_from_one_is_refused(model: Any, settings: Any) -> None:
    message = f"{next(iter(settings))} must be an integer at least 1, got"
    with pytest.raises(ValueError, match=message):
        engine_of(model, **settings)


def test_an_eos_outside_the_vocabulary_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="eos_token_id must be an integer in .0, 59., got 60"):
        RolloutEngine(model, eos_token_id=[1, 60])


def test_an_unpatched_model_is_refused(tiny_qwen3: Callable[..., Qwen3ForCausalLM]) -> None:
    stock = tiny_qwen3()
    with pytest.raises(ValueError, match="patch"):
        engine_of(stock)
    with patch(stock):
        engine = engine_of(stock)
    with pytest.raises(ValueError, match="patch"):
        engine.generate([[1]], SamplingParams())
