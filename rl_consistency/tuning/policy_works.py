"""The launches of a policy: the ops of its layers and its head, for 1 row up to a training batch.

Rollouts run each layer for the rows of a decode step, and for the rows of a prefill. Training runs
it forward and backward for the rows of a micro-batch. Rows come in buckets, as picks look them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rl_consistency.cases import launches
from rl_consistency.cases.case import Setting
from rl_consistency.cases.experts import expert_fold, expert_product
from rl_consistency.cases.launches import Launch, outer, product
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import MOST_ROWS, rows_bucket
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.linear.schedules import fuses_gate_up, fuses_qkv
from rl_consistency.kernels.token_logprobs.cuda import STATISTICS_CHUNK
from rl_consistency.models import families
from rl_consistency.models.sharding import unwrapped

TUNED_COLUMNS = 8
"""Columns are a multiple of this, as descriptors and the library need."""

FP32 = torch.float32

DECODE_ROWS = 512
"""The most rows of a decode step that are tuned for."""
DECODE_STEPS = 64
"""A rollout decodes so many times per training batch, at least; it orders the launches."""
LEAST_TRAINING_ROWS = 256
"""A micro-batch has at least so many tokens."""

Calls = Iterator[tuple[float, Launch]]
"""How often a step of training makes a launch, and the launch."""


def policy_works(
    config: Any, dtype: torch.dtype, device: torch.device, rows: int = MOST_ROWS
) -> list[Launch]:
    """The launches of a Hugging Face configuration, those first that take most of a step.

    Raises:
        UnsupportedModelError: a configuration that no canonical order covers.
        TypeError: a dtype without one.
        ValueError: fewer than 1 row.
    """
    families.check_config(config)
    if dtype not in DTYPES:
        raise TypeError(f"no canonical order for {dtype}; allowed: {', '.join(map(str, DTYPES))}.")
    if type(rows) is not int or rows < 1:
        raise ValueError(f"rows={rows!r}: give the tokens of a training batch, 1 or more.")
    setting = Setting(dtype=dtype, device=device)
    largest, fewer = (
        [
            replace(launch, calls=calls)
            for calls, launch in _launches(config, setting, rows, of)
            if _has_aligned_rows(launch)
        ]
        for of in (rows_bucket, fewer_rows)
    )
    return sorted(with_fewer(largest, fewer), key=lambda work: -work.seconds)


def policy_config(model: nn.Module) -> tuple[Any, torch.dtype]:
    """The configuration and the dtype of a model, under any wrapper."""
    policy = unwrapped(model)
    config = getattr(policy, "config", None)
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    if config is None or parameter is None:
        what = f"got {type(model).__name__}; give the model that is patched."
        raise TypeError(f"tune takes a Hugging Face causal LM, {what}")
    return config, parameter.dtype


def fewer_rows(rows: int) -> int:
    """Rows from the lower end of the bucket that ends at `rows`: 9/16 of them."""
    return max(1, rows * 9 // 16)


def with_fewer(works: Iterable[Launch], fewer: Iterable[Launch]) -> list[Launch]:
    """Launches by entry, each with that of `fewer` whose rows share its bucket and are not its
    own."""
    others, found = {work.entry: work for work in fewer}, {work.entry: work for work in works}
    for entry in others.keys() & found.keys():
        if others[entry].shape != found[entry].shape:
            found[entry] = replace(found[entry], fewer=others[entry])
    return list(found.values())


def _launches(config: Any, setting: Setting, rows: int, of: Callable[[int], int]) -> Calls:
    """The launches with `of(bucket)` rows for each bucket."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    for bucket in sorted({rows_bucket(m) for m in (*(2**i for i in range(15)), rows) if m <= rows}):
        m, decodes = of(bucket), bucket <= DECODE_ROWS
        yield from _layer_forward(config, setting, m, DECODE_STEPS if decodes else 1)
        if decodes:
            yield DECODE_STEPS, product(setting, "nt", m, vocabulary, hidden, FP32)
        if bucket >= min(LEAST_TRAINING_ROWS, rows):
            yield from _layer_backward(config, setting, m)
    yield from _head(config, setting, of(rows_bucket(rows)))


def _layer_forward(config: Any, setting: Setting, m: int, steps: float) -> Calls:
    """All layers for m rows; few rows compute q, k, v and gate, up in one launch each."""
    hidden, calls = config.hidden_size, config.num_hidden_layers * steps
    heads, kv_heads, dim = _heads(config)
    columns = heads * dim, kv_heads * dim, kv_heads * dim
    if one_qkv := fuses_qkv(m, columns, setting.dtype):
        yield calls, launches.qkv(setting, m, columns, hidden)
    for (n, k), count in Counter(_attention_weights(config, qkv=not one_qkv)).items():
        yield calls * count, product(setting, "nt", m, n, k)
    activation = _activation(config)
    if sparse := steps * sparse_layers(config):
        inner, experts, top_k = _expert_sizes(config)
        sizes = m, top_k, experts
        yield sparse, product(setting, "nt", m, experts, hidden, FP32)
        yield sparse, expert_product(setting, "gate_up", *sizes, inner, hidden, activation)
        yield sparse, expert_product(setting, "nt", *sizes, hidden, inner)
    if dense := calls - sparse:
        inner = config.intermediate_size
        if fuses_gate_up(m, inner, setting.dtype, has_tma(setting.device)):
            yield dense, launches.gate_up(setting, m, inner, hidden, activation)
        else:
            yield dense, launches.gated(setting, "forward", m, inner, activation)
            yield 2 * dense, product(setting, "nt", m, inner, hidden)
        yield dense, product(setting, "nt", m, hidden, inner)
    for adds in (False, True):
        yield calls, launches.norm_forward(setting, m, hidden, adds=adds)
    if config.model_type in families.HEAD_NORMS:
        for count in (heads, kv_heads):
            yield calls, launches.norm_forward(setting, m * count, dim)
    yield calls, launches.rotation(setting, m, heads, kv_heads, dim)


def _layer_backward(config: Any, setting: Setting, m: int) -> Calls:
    """The gradients of all layers for a micro-batch of m rows."""
    hidden, calls = config.hidden_size, config.num_hidden_layers
    inner, sparse = config.intermediate_size, sparse_layers(config)
    dense = calls - sparse
    weights = [(n, k, calls * c) for (n, k), c in Counter(_attention_weights(config)).items()]
    if dense:
        weights += [(inner, hidden, 2 * dense), (hidden, inner, dense)]
        yield dense, launches.gated(setting, "backward", m, inner, _activation(config))
    if sparse:
        inner, experts, top_k = _expert_sizes(config)
        weights.append((experts, hidden, sparse))
        sizes = m, top_k, experts
        yield sparse, expert_product(setting, "nn", *sizes, inner, hidden, by_row=True)
        yield sparse, expert_product(setting, "nn", *sizes, hidden, 2 * inner)
        yield sparse, expert_fold(setting, *sizes, 2 * inner, hidden)
        yield sparse, expert_fold(setting, *sizes, hidden, inner, dy_by_row=True)
    for n, k, count in weights:
        yield count, product(setting, "nn", m, k, n)
        yield count, outer(setting, m, n, k)
    for adds in (False, True):
        yield calls, launches.norm_backward(setting, m, hidden, adds=adds)


def _head(config: Any, setting: Setting, rows: int) -> Calls:
    """The LM head in training: its gradients come in chunks of tokens."""
    sizes = vocabulary, hidden = config.vocab_size, config.hidden_size
    chunk = min(max(128, hidden // 128 * 128), rows)
    calls = rows / chunk
    yield calls, product(setting, "nn", chunk, hidden, vocabulary)
    yield calls, outer(setting, chunk, *sizes)
    if has_tma(setting.device) and setting.dtype != FP32:
        scored = min(rows, STATISTICS_CHUNK)
        yield rows / scored, launches.head(setting, "statistics", scored, *sizes)
        yield calls, launches.head(setting, "gradient", chunk, *sizes)


def sparse_layers(config: Any) -> int:
    """How many layers of a configuration have experts."""
    if config.model_type not in families.SPARSE or not families.num_experts(config):
        return 0
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", ())
    return sum(
        (layer + 1) % step == 0 and layer not in (dense or ())
        for layer in range(config.num_hidden_layers)
    )


def _expert_sizes(config: Any) -> tuple[int, int, int]:
    """Inner width, experts, and experts of a row."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return inner, families.num_experts(config), config.num_experts_per_tok


def _activation(config: Any) -> str:
    return families.ACTIVATIONS[getattr(config, "hidden_act", "silu")]


def _heads(config: Any) -> tuple[int, int, int]:
    """Heads, heads of keys and values, and their size."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, config.num_key_value_heads, dim


def _attention_weights(config: Any, *, qkv: bool = True) -> list[tuple[int, int]]:
    """Weights [n, k] of a layer's attention, with those that a fused launch may take or without."""
    hidden = config.hidden_size
    heads, kv_heads, dim = _heads(config)
    columns = [heads * dim, kv_heads * dim, kv_heads * dim] if qkv else []
    return [(hidden, heads * dim), *((n, hidden) for n in columns)]


def _has_aligned_rows(work: Launch) -> bool:
    """Whether descriptors and the library can address the weights; others keep the op's rule."""
    sizes = "+".join(str(work.shape.get(name, 0)) for name in "nk").split("+")
    return all(int(size) % TUNED_COLUMNS == 0 for size in sizes)
