"""The rollout engine of a recipe, and what is logged of it."""

from __future__ import annotations

import math
from typing import Any

from rl_consistency.rollout.block_manager import cache_shape
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.tokenizer import eos_token_ids
from rl_consistency.trainers.config.recipe import RunConfig

ENGINE_METRICS = (
    *("prefill_tokens_per_second", "decode_tokens_per_second", "mean_seconds_to_first_token"),
    *("host_seconds_per_step", "peak_kv_share", "prefix_hit_tokens", "preemptions"),
    "acceptance_rate",
)
"""Fields of the engine's statistics that are logged with a step."""


def engine_of(config: RunConfig, model: Any, tokenizer: Any) -> RolloutEngine:
    """The rollout engine around a patched model, with room for a step of the recipe."""
    rollout = config.rollout
    block_size, num_blocks, max_num_seqs, tokens_per_sequence = _cache_settings(config)
    return RolloutEngine(
        model,
        eos_token_id=eos_token_ids(model, tokenizer),
        kv_block_size=block_size,
        num_kv_blocks=num_blocks,
        max_batch_tokens=rollout.max_batch_tokens,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=rollout.prefill_chunk_size,
        enable_prefix_sharing=rollout.prefix_sharing,
        tokens_per_sequence=tokens_per_sequence,
        cuda_graphs=rollout.cuda_graphs,
        # With one it decodes all completions.
        tokenizer=tokenizer if config.sampling.stop or config.eval_sampling.stop else None,
    )


def cache_bytes_of(config: RunConfig, model: Any) -> int:
    """Bytes of the KV cache of the engine that `engine_of` would make now."""
    return math.prod(cache_shape(model, *_cache_settings(config))) * model.dtype.itemsize


def _cache_settings(config: RunConfig) -> tuple[int, int | None, int, int]:
    """Settings of the cache, as `cache_shape` takes them."""
    rollout, sampling = config.rollout, config.sampling
    most = min(rollout.max_num_seqs, rollout.prompts_per_step * sampling.n)
    return rollout.kv_block_size, rollout.num_kv_blocks, most, config.longest_sequence
