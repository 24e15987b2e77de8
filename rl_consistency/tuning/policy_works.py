"""The works of a policy: the ops of its layers and its head, for 1 row up to a training batch.

Rollouts run each layer for the rows of a decode step, and for the rows of a prefill. Training runs
it forward and backward for the rows of a micro-batch. Rows come in buckets, as picks look them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rl_consistency.cases import launches
from rl_consistency.cases.case import Setting
from rl_consistency.cases.expert_launches import expert_fold, expert_product
from rl_consistency.cases.launches import outer, product
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import MOST_ROWS, rows_bucket
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.linear.schedules import fuses_gate_up, fuses_qkv
from rl_consistency.kernels.token_logprobs.cuda import STATISTICS_CHUNK
from rl_consistency.models.families import (
    ACTIVATIONS,
    HEAD_NORMS,
    SPARSE,
    check_config,
    num_experts,
)
from rl_consistency.models.sharding import unwrapped
from rl_consistency.tuning.work import Work, fewer_rows, with_fewer, work_of

TUNED_COLUMNS = 8
"""Columns are a multiple of this, as descriptors and the library need."""

FP32 = torch.float32

DECODE_ROWS = 512
"""The most rows of a decode step that are tuned for."""

DECODE_STEPS = 64
"""A rollout decodes so many times per training batch, at least; it orders the works."""

LEAST_TRAINING_ROWS = 256
"""A micro-batch has at least so many tokens."""


def policy_works(
    config: Any, dtype: torch.dtype, device: torch.device, rows: int = MOST_ROWS
) -> list[Work]:
    """The works of a Hugging Face configuration, those first that take most of a step.

    Raises:
        UnsupportedModelError: a configuration that no canonical order covers.
        TypeError: a dtype without one.
        ValueError: fewer than 1 row.
    """
    check_config(config)
    if dtype not in DTYPES:
        raise TypeError(f"no canonical order for {dtype}; allowed: {', '.join(map(str, DTYPES))}.")
    if type(rows) is not int or rows < 1:
        raise ValueError(f"rows={rows!r}: give the tokens of a training batch, 1 or more.")
    setting = Setting(dtype=dtype, device=device)
    largest, fewer = (
        filter(_has_aligned_rows, _works(config, setting, rows, of))
        for of in (rows_bucket, fewer_rows)
    )
    return sorted(with_fewer(largest, fewer), key=lambda work: -work.seconds)


def policy_config(model: nn.Module) -> tuple[Any, torch.dtype]:
    """The configuration and the dtype of a model, under any wrapper."""
    policy = unwrapped(model)
    config = getattr(policy, "config", None)
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    if config is None or parameter is None:
        raise TypeError(
            f"tune takes a Hugging Face causal LM, got {type(model).__name__}; give the model "
            "that is patched."
        )
    return config, parameter.dtype


def _buckets(rows: int) -> list[int]:
    return sorted({rows_bucket(m) for m in (1, *(2**i for i in range(15)), rows) if m <= rows})


def _works(config: Any, setting: Setting, rows: int, of: Callable[[int], int]) -> Iterator[Work]:
    """The works with `of(bucket)` rows for each bucket."""
    for bucket in _buckets(rows):
        m, steps = of(bucket), DECODE_STEPS if bucket <= DECODE_ROWS else 1
        yield from _layer_forward(config, setting, m, steps)
        if bucket <= DECODE_ROWS:
            vocabulary, hidden = config.vocab_size, config.hidden_size
            yield work_of(product(setting, "nt", m, vocabulary, hidden, FP32), steps)
        if bucket >= min(LEAST_TRAINING_ROWS, rows):
            yield from _layer_backward(config, setting, m)
    yield from _head_works(config, setting, of(rows_bucket(rows)))


def _layer_forward(config: Any, setting: Setting, m: int, steps: float) -> Iterator[Work]:
    """All layers for m rows; few rows compute q, k, v and gate, up in one launch each."""
    hidden, calls = config.hidden_size, config.num_hidden_layers * steps
    heads, kv_heads, dim = _heads(config)
    columns = heads * dim, kv_heads * dim, kv_heads * dim
    one_qkv = fuses_qkv(m, columns, setting.dtype)
    if one_qkv:
        yield work_of(launches.qkv(setting, m, columns, hidden), calls)
    for (n, k), count in Counter(_attention_weights(config, qkv=not one_qkv)).items():
        yield work_of(product(setting, "nt", m, n, k), calls * count)
    sparse = sparse_layers(config)
    if sparse:
        yield from _sparse_forward(config, setting, m, sparse * steps)
    if sparse < config.num_hidden_layers:
        yield from _dense_forward(config, setting, m, (config.num_hidden_layers - sparse) * steps)
    for adds in (False, True):
        yield work_of(launches.norm_forward(setting, m, hidden, adds=adds), calls)
    if config.model_type in HEAD_NORMS:
        for count in (heads, kv_heads):
            yield work_of(launches.norm_forward(setting, m * count, dim), calls)
    yield work_of(launches.rotation(setting, m, heads, kv_heads, dim), calls)


def _dense_forward(config: Any, setting: Setting, m: int, calls: float) -> Iterator[Work]:
    """An MLP without experts."""
    hidden, inner, activation = config.hidden_size, config.intermediate_size, _activation(config)
    if fuses_gate_up(m, inner, setting.dtype, has_tma(setting.device)):
        yield work_of(launches.gate_up(setting, m, inner, hidden, activation), calls)
    else:
        yield work_of(launches.gated(setting, "forward", m, inner, activation), calls)
        yield work_of(product(setting, "nt", m, inner, hidden), 2 * calls)
    yield work_of(product(setting, "nt", m, hidden, inner), calls)


def _layer_backward(config: Any, setting: Setting, m: int) -> Iterator[Work]:
    """The gradients of all layers for a micro-batch of m rows."""
    hidden, calls = config.hidden_size, config.num_hidden_layers
    sparse = sparse_layers(config)
    inner, dense = config.intermediate_size, calls - sparse
    weights = [(n, k, calls * c) for (n, k), c in Counter(_attention_weights(config)).items()]
    if dense:
        weights += [(inner, hidden, 2 * dense), (hidden, inner, dense)]
    for n, k, count in weights:
        yield work_of(product(setting, "nn", m, k, n), count)
        yield work_of(outer(setting, m, n, k), count)
    if sparse:
        yield from _sparse_backward(config, setting, m, sparse)
    if dense:
        yield work_of(launches.gated(setting, "backward", m, inner, _activation(config)), dense)
    for adds in (False, True):
        yield work_of(launches.norm_backward(setting, m, hidden, adds=adds), calls)


def _sparse_forward(config: Any, setting: Setting, m: int, calls: float) -> Iterator[Work]:
    """Router and experts for m rows."""
    hidden, inner, experts, top_k = _expert_sizes(config)
    sizes = m, top_k, experts
    for launch in (
        product(setting, "nt", m, experts, hidden, FP32),
        expert_product(setting, "gate_up", *sizes, inner, hidden, _activation(config)),
        expert_product(setting, "nt", *sizes, hidden, inner),
    ):
        yield work_of(launch, calls)


def _sparse_backward(config: Any, setting: Setting, m: int, calls: float) -> Iterator[Work]:
    """Gradients of router and experts for a micro-batch of m rows."""
    hidden, inner, experts, top_k = _expert_sizes(config)
    sizes = m, top_k, experts
    for launch in (
        product(setting, "nn", m, hidden, experts),
        outer(setting, m, experts, hidden),
        expert_product(setting, "nn", *sizes, inner, hidden, by_row=True),
        expert_product(setting, "nn", *sizes, hidden, 2 * inner),
        expert_fold(setting, *sizes, 2 * inner, hidden),
        expert_fold(setting, *sizes, hidden, inner, dy_by_row=True),
    ):
        yield work_of(launch, calls)


def _head_works(config: Any, setting: Setting, rows: int) -> Iterator[Work]:
    """The LM head in training: its gradients come in chunks of tokens."""
    sizes = vocabulary, hidden = config.vocab_size, config.hidden_size
    chunk = min(max(128, hidden // 128 * 128), rows)
    calls = rows / chunk
    yield work_of(product(setting, "nn", chunk, hidden, vocabulary), calls)
    yield work_of(outer(setting, chunk, *sizes), calls)
    if has_tma(setting.device) and setting.dtype != FP32:
        scored = min(rows, STATISTICS_CHUNK)
        yield work_of(launches.head(setting, "statistics", scored, *sizes), rows / scored)
        yield work_of(launches.head(setting, "gradient", chunk, *sizes), calls)


def sparse_layers(config: Any) -> int:
    """How many layers of a configuration have experts."""
    if config.model_type not in SPARSE or not num_experts(config):
        return 0
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", ())
    return sum(
        (layer + 1) % step == 0 and layer not in (dense or ())
        for layer in range(config.num_hidden_layers)
    )


def _expert_sizes(config: Any) -> tuple[int, int, int, int]:
    """Hidden and inner width, experts, and experts of a row."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return config.hidden_size, inner, num_experts(config), config.num_experts_per_tok


def _activation(config: Any) -> str:
    return ACTIVATIONS[getattr(config, "hidden_act", "silu")]


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


def _has_aligned_rows(work: Work) -> bool:
    """Whether descriptors and the library can address the weights; others keep the op's rule."""
    sizes = "+".join(str(work.shape.get(name, 0)) for name in "nk").split("+")
    return all(int(size) % TUNED_COLUMNS == 0 for size in sizes)
