"""The kernels of an engine, compiled side by side before vLLM runs the model for the first time.

vLLM compiles what its own steps at start launch, one after the other, and leaves the rest to
requests. The sizes here are those that a `RolloutEngine` compiles for, and those that are captured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rl_consistency.integrations.vllm.cache import empty_block, keys_and_values
from rl_consistency.integrations.vllm.steps import CacheViews, StepAttention, decode_layout
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PagedAttention,
    SequenceTables,
)
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from rl_consistency.kernels.core.launch import next_power_of_2
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.forward import (
    attend_to_anything,
    cache_sizes,
    next_token_logits,
    paged_hidden_states,
)
from rl_consistency.rollout.device.calls import RaggedShape
from rl_consistency.rollout.device.rollout_kernels import (
    RolloutBounds,
    continued_shapes,
    prompt_shapes,
    row_counts,
)
from rl_consistency.rollout.device.sampling_table import SamplingTable
from rl_consistency.rollout.progress import compile_line
from rl_consistency.rollout.sampling_params import Truncation
from rl_consistency.rollout.weights import model_digest


@torch.no_grad()
def compile_kernels(hf: Any, vllm_config: Any) -> int:
    """Compile what steps of the patched model launch under a configuration of vLLM; returns how
    many kernels were missing. Nothing is compiled for a CPU."""
    if hf.get_input_embeddings().weight.device.type != "cuda":
        return 0
    with compile_line() as report:
        compiled = compile_ahead(kernel_calls(hf, vllm_config), report)
    # Certificates of the library are made in a real call, one for each power of two of rows. vLLM
    # runs the captured numbers of rows by itself, and the largest.
    cache, most = _padding(hf, vllm_config), vllm_config.scheduler_config.max_num_batched_tokens
    rows = next_power_of_2(_largest_captured(vllm_config) + 1)
    while rows < most:
        _run(hf, _between_graphs(rows, cache))
        rows *= 2
    # vLLM collects garbage before each capture, and freezes what is there once it has started.
    gc.collect()
    gc.freeze()
    return compiled


def _sizes(vllm_config: Any) -> list[int]:
    return vllm_config.compilation_config.cudagraph_capture_sizes or []


def _largest_captured(vllm_config: Any) -> int:
    """Rows up to which every step is captured, or padded to one that is."""
    mode, sizes = vllm_config.compilation_config.cudagraph_mode, _sizes(vllm_config)
    return max(sizes) if sizes and mode.has_piecewise_cudagraphs() else 0


def kernel_calls(hf: Any, vllm_config: Any) -> Iterator[Callable[[], object]]:
    """Calls of the model and its parts that stand for those of all steps; no key is written."""
    scheduler, sizes = vllm_config.scheduler_config, _sizes(vllm_config)
    tokens, sequences = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    longest = vllm_config.model_config.max_model_len
    bounds = RolloutBounds(tokens=tokens, sequences=sequences, longest=longest, batch_sizes=())
    cache = _padding(hf, vllm_config)
    # Attention first: it takes the compiler the longest.
    for shape in (*continued_shapes(bounds), *prompt_shapes(bounds)):
        yield partial(attend_to_anything, hf, _chunks(shape, cache))
    op_by_op = [rows for rows in row_counts(tokens) if rows > _largest_captured(vllm_config)]
    for rows in dict.fromkeys([*sizes, *op_by_op]):
        yield partial(_run, hf, _between_graphs(rows, cache))
    for rows in (rows for rows in sizes if rows <= sequences):
        table = cache["key_cache"][0].new_zeros(
            rows, -(-longest // cache["block_size"]), dtype=torch.int32
        )
        yield partial(_run, hf, decode_layout(table, longest, cache))
    hidden = cache["key_cache"][0].new_zeros(sequences, hf.config.hidden_size)
    logits = hidden.new_zeros(sequences, hf.config.vocab_size, dtype=torch.float32)
    for rows in row_counts(sequences):
        yield partial(next_token_logits, hf, hidden[:rows])
        for truncates in Truncation:
            yield partial(_sample, logits[:rows], truncates)
    yield partial(model_digest, hf)


def _padding(hf: Any, vllm_config: Any) -> CacheViews:
    """Keys and values of one block, laid out as vLLM's: kernels read where it says, or nowhere."""
    (layers, kv_heads, head_dim), block_size = cache_sizes(hf), vllm_config.cache_config.block_size
    block = empty_block(block_size, kv_heads, head_dim, hf.get_input_embeddings().weight)
    keys, values = ([views] * layers for views in keys_and_values(block, head_dim))
    return {"key_cache": keys, "value_cache": values, "block_size": block_size}


def _chunks(shape: RaggedShape, cache: CacheViews) -> StepAttention:
    count, queries, keys = shape.sequences, shape.queries, shape.past + shape.queries
    places = range(0, count * queries, queries)
    numbers = torch.tensor([list(places), [queries] * count, [keys] * count], dtype=torch.int32)
    starts, lens, contexts = numbers.to(cache["key_cache"][0].device).unbind(0)
    table = starts.new_zeros(count, -(-keys // cache["block_size"]))
    return StepAttention(
        query_starts=places,
        query_lens=[queries] * count,
        context_lens=[keys] * count,
        block_tables=(),
        slot_mapping=starts.new_zeros(count * queries, dtype=torch.int64),
        numbers=SequenceTables(starts, lens, contexts, table),
        **cache,
    )


def _between_graphs(rows: int, cache: CacheViews) -> PagedAttention:
    """The layout of a step in which attention is called between graphs; here it is not."""
    used = cache["key_cache"][0].new_full((1,), rows, dtype=torch.int32)
    slots = used.new_zeros(rows, dtype=torch.int64)
    return CapturedPagedAttention.interrupted(
        lambda q, *_: torch.zeros_like(q), used, slot_mapping=slots, **cache
    )


def _run(hf: Any, layout: PagedAttention) -> None:
    zeros = torch.zeros_like(layout.slot_mapping)
    with certified_to_the_row():
        paged_hidden_states(hf, zeros, zeros, layout)


def _sample(logits: torch.Tensor, truncates: Truncation) -> None:
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    token_ids, logprobs_of = SamplingTable(1, logits.device).draw(logits, zeros, zeros, truncates)
    logprobs_of(token_ids)
