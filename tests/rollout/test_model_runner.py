"""The model runner's inputs say where every token lies, and its cache has the model's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.rollout.model_runner import (
    DEFAULT_TOKENS_PER_SEQUENCE,
    GPU_CACHE_SHARE,
    ModelRunner,
    _cache_bytes,
)
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import ScheduledChunk
from rl_consistency.rollout.sequence import RolloutSequence


def tiny_config(**changes: Any) -> Qwen3Config:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    return Qwen3Config(**{**sizes, **changes})


@pytest.fixture
def model() -> Iterator[Qwen3ForCausalLM]:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config()).eval()
    with patch(model):
        yield model


def make(tokens: list[int], block_table: list[int], computed: int = 0) -> RolloutSequence:
    sequence = RolloutSequence(
        prompt_index=0,
        sample_index=0,
        prompt_id=0,
        params=SamplingParams(),
        stop_token_ids=frozenset(),
        token_ids=tokens,
    )
    sequence.block_table, sequence.num_computed_tokens = block_table, computed
    return sequence


def runner_of(model: Any, num_blocks: int | None = 8, max_num_seqs: int = 4) -> ModelRunner:
    return ModelRunner(model, block_size=4, num_blocks=num_blocks, max_num_seqs=max_num_seqs)


def test_inputs_name_every_token_position_and_slot(model: Qwen3ForCausalLM) -> None:
    prefill = make([10, 11, 12, 13, 14, 15, 16], [5, 2], computed=2)
    decode = make([20, 21, 22, 23, 24], [7, 1], computed=4)
    chunks = [ScheduledChunk.next_of(prefill, 4), ScheduledChunk.next_of(decode, 1)]
    input_ids, position_ids, paged = runner_of(model)._inputs(chunks)
    assert input_ids.tolist() == [12, 13, 14, 15, 24]
    assert position_ids.tolist() == [2, 3, 4, 5, 4]
    assert paged.slot_mapping.tolist() == [22, 23, 8, 9, 4]
    assert (paged.query_starts, paged.query_lens) == ([0, 4], [4, 1])
    assert (paged.context_lens, paged.block_tables) == ([6, 5], [[5, 2], [7, 1]])


def test_only_chunks_that_end_a_sequence_give_a_row_of_logits(model: Qwen3ForCausalLM) -> None:
    runner = runner_of(model)
    part, whole = make([1, 2, 3, 4, 5], [0, 1]), make([6, 7], [2])
    chunks = [ScheduledChunk.next_of(part, 3), ScheduledChunk.next_of(whole, 2)]
    logits = runner.logits(chunks)
    assert logits.shape == (1, 40) and logits.dtype == torch.float32
    assert logits.equal(runner_of(model).logits([ScheduledChunk.next_of(whole, 2)]))
    assert runner.logits(chunks[:1]).shape == (0, 40)
    assert not logits.requires_grad


def test_slots_a_sequence_does_not_own_are_never_read(model: Qwen3ForCausalLM) -> None:
    clean, dirty = runner_of(model), runner_of(model)
    for cache in dirty._key_cache + dirty._value_cache:
        cache.fill_(torch.nan)
    chunks = [ScheduledChunk.next_of(make([1, 2, 3, 4, 5], [6, 3]), 5)]
    assert dirty.logits(chunks).equal(clean.logits(chunks))


def test_the_cache_has_the_dtype_and_shape_of_the_model() -> None:
    model = Qwen3ForCausalLM(tiny_config()).to(torch.bfloat16).eval()
    with patch(model):
        runner = runner_of(model)
    caches = runner._key_cache + runner._value_cache
    assert len(caches) == 4
    assert all(c.shape == (8, 4, 2, 16) and c.dtype == torch.bfloat16 for c in caches)


def test_the_default_cache_holds_all_running_sequences(model: Qwen3ForCausalLM) -> None:
    assert runner_of(model, None, max_num_seqs=3).num_blocks == 3 * 16  # context of 64 tokens
    model.config.max_position_embeddings = 10 * DEFAULT_TOKENS_PER_SEQUENCE
    assert runner_of(model, None, max_num_seqs=3).num_blocks == 3 * 256


def test_the_default_cache_is_bounded_but_holds_one_sequence(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    limit = "rl_consistency.rollout.model_runner.CPU_CACHE_BYTES"
    monkeypatch.setattr(limit, 20 * block_bytes)
    assert runner_of(model, None, max_num_seqs=3).num_blocks == 20
    monkeypatch.setattr(limit, 2 * block_bytes)
    assert runner_of(model, None, max_num_seqs=3).num_blocks == 16


def test_the_default_cache_follows_the_longest_sequence_to_expect(
    model: Qwen3ForCausalLM,
) -> None:
    def blocks(tokens: int) -> int:
        return ModelRunner(
            model, block_size=4, num_blocks=None, max_num_seqs=3, tokens_per_sequence=tokens
        ).num_blocks

    assert blocks(9) == 3 * 3
    assert blocks(1000) == 3 * 16  # no longer than the context of 64 tokens


def test_on_a_gpu_the_default_cache_takes_its_share_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = {"mem_get_info": (600, 1000), "memory_reserved": 500, "memory_allocated": 100}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert _cache_bytes(torch.device("cuda")) == int(1000 * GPU_CACHE_SHARE)


def test_a_cache_that_does_not_fit_says_how_large_it_is(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ValueError, match=r"no room on cpu .* 1048576 blocks of 4 tokens \(2\.0 GiB"
    ):
        runner_of(model, 1 << 20)


def test_a_model_cast_after_the_cache_was_made_is_refused(model: Qwen3ForCausalLM) -> None:
    runner = runner_of(model)
    runner.check_model()
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="build the RolloutEngine after"):
        runner.check_model()
