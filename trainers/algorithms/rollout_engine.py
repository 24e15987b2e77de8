"""The rollout engine as a recipe asks for it."""

from __future__ import annotations

from typing import Any

from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.policy import eos_token_ids


def engine_of(config: RunConfig, model: Any, tokenizer: Any) -> RolloutEngine:
    """Around a patched model, with room for a step of the recipe."""
    rollout, sampling = config.rollout, config.sampling
    return RolloutEngine(
        model,
        eos_token_id=eos_token_ids(model, tokenizer),
        kv_block_size=rollout.kv_block_size,
        num_kv_blocks=rollout.num_kv_blocks,
        max_batch_tokens=rollout.max_batch_tokens,
        max_num_seqs=min(rollout.max_num_seqs, rollout.prompts_per_step * sampling.n),
        prefill_chunk_size=rollout.prefill_chunk_size,
        enable_prefix_sharing=rollout.prefix_sharing,
        tokens_per_sequence=config.data.max_prompt_tokens + sampling.max_tokens,
        cuda_graphs=rollout.cuda_graphs,
    )
