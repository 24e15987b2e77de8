"""The works of a policy: the ops of its layers and its head, for 1 row up to a training batch.

Rollouts run each layer for the rows of a decode step, and for the rows of a prefill. Training runs
it forward and backward for the rows of a micro-batch. Rows come in buckets, as picks look them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import MOST_ROWS, rows_bucket
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.linear.schedules import fuses_gate_up, fuses_qkv
from rl_consistency.kernels.token_logprobs.cuda import STATISTICS_CHUNK
from rl_consistency.models.families import ACTIVATIONS, HEAD_NORMS, check_config
from rl_consistency.models.sharding import unwrapped
from rl_consistency.tuning.products import (
    TUNED_COLUMNS,
    fold,
    fused_gate_up,
    fused_qkv,
    product,
)
from rl_consistency.tuning.row_ops import (
    glu_work,
    head_gradient,
    head_statistics,
    norm_backward,
    norm_forward,
    rotary_work,
)
from rl_consistency.tuning.sparse_works import sparse_backward, sparse_forward, sparse_layers
from rl_consistency.tuning.work import Work, fewer_rows, with_fewer

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
    largest, fewer = (
        filter(_has_aligned_rows, _works(config, dtype, device, rows, of))
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


def _works(
    config: Any, dtype: torch.dtype, device: torch.device, rows: int, of: Callable[[int], int]
) -> Iterator[Work]:
    """The works with `of(bucket)` rows for each bucket."""
    for bucket in _buckets(rows):
        m, steps = of(bucket), DECODE_STEPS if bucket <= DECODE_ROWS else 1
        yield from _layer_forward(config, dtype, device, m, steps)
        if bucket <= DECODE_ROWS:
            vocabulary, hidden = config.vocab_size, config.hidden_size
            yield product(device, "nt", m, vocabulary, hidden, dtype, torch.float32, steps)
        if bucket >= min(LEAST_TRAINING_ROWS, rows):
            yield from _layer_backward(config, dtype, device, m)
    yield from _head_works(config, dtype, device, of(rows_bucket(rows)))


def _layer_forward(
    config: Any, dtype: torch.dtype, device: torch.device, m: int, steps: float
) -> Iterator[Work]:
    """All layers for m rows; few rows compute q, k, v and gate, up in one launch each."""
    hidden, calls = config.hidden_size, config.num_hidden_layers * steps
    heads, kv_heads, dim = _heads(config)
    columns = heads * dim, kv_heads * dim, kv_heads * dim
    one_qkv = fuses_qkv(m, columns, dtype)
    if one_qkv:
        yield fused_qkv(device, m, columns, hidden, dtype, calls)
    for (n, k), count in _counted(_attention_weights(config, qkv=not one_qkv)):
        yield product(device, "nt", m, n, k, dtype, dtype, calls * count)
    sparse = sparse_layers(config)
    if sparse:
        yield from sparse_forward(config, dtype, device, m, sparse * steps)
    if sparse < config.num_hidden_layers:
        dense = (config.num_hidden_layers - sparse) * steps
        yield from _dense_forward(config, dtype, device, m, dense)
    for adds in (False, True):
        yield norm_forward(device, m, hidden, dtype, adds=adds, calls=calls)
    if config.model_type in HEAD_NORMS:
        for count in (heads, kv_heads):
            yield norm_forward(device, m * count, dim, dtype, calls=calls)
    yield rotary_work(device, m, heads, kv_heads, dim, dtype, calls)


def _dense_forward(
    config: Any, dtype: torch.dtype, device: torch.device, m: int, calls: float
) -> Iterator[Work]:
    """An MLP without experts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    activation = ACTIVATIONS[getattr(config, "hidden_act", "silu")]
    one_glu = fuses_gate_up(m, inner, dtype, has_tma(device))
    if one_glu:
        yield fused_gate_up(device, m, inner, hidden, dtype, activation, calls)
    else:
        yield glu_work(device, "forward", m, inner, dtype, activation, calls)
        yield product(device, "nt", m, inner, hidden, dtype, dtype, 2 * calls)
    yield product(device, "nt", m, hidden, inner, dtype, dtype, calls)


def _layer_backward(
    config: Any, dtype: torch.dtype, device: torch.device, m: int
) -> Iterator[Work]:
    """The gradients of all layers for a micro-batch of m rows."""
    hidden, calls = config.hidden_size, config.num_hidden_layers
    for (n, k), count in _counted(_attention_weights(config)):
        yield product(device, "nn", m, k, n, dtype, dtype, calls * count)
        yield fold(device, m, n, k, dtype, calls * count)
    sparse = sparse_layers(config)
    if sparse:
        yield from sparse_backward(config, dtype, device, m, sparse)
    if sparse < calls:
        inner, dense = config.intermediate_size, calls - sparse
        for (n, k), count in (((inner, hidden), 2), ((hidden, inner), 1)):
            yield product(device, "nn", m, k, n, dtype, dtype, dense * count)
            yield fold(device, m, n, k, dtype, dense * count)
        activation = ACTIVATIONS[getattr(config, "hidden_act", "silu")]
        yield glu_work(device, "backward", m, inner, dtype, activation, dense)
    for adds in (False, True):
        yield norm_backward(device, m, hidden, dtype, adds=adds, calls=calls)


def _head_works(config: Any, dtype: torch.dtype, device: torch.device, rows: int) -> Iterator[Work]:
    """The LM head in training: its gradients come in chunks of tokens."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    chunk = min(max(128, hidden // 128 * 128), rows)
    calls = rows / chunk
    yield product(device, "nn", chunk, hidden, vocabulary, dtype, dtype, calls)
    yield fold(device, chunk, vocabulary, hidden, dtype, calls)
    if has_tma(device) and dtype != torch.float32:
        scored = min(rows, STATISTICS_CHUNK)
        yield head_statistics(device, scored, vocabulary, hidden, dtype, rows / scored)
        yield head_gradient(device, chunk, vocabulary, hidden, dtype, calls)


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


def _counted(shapes: list[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    for shape in shapes:
        counts[shape] += 1
    return list(counts.items())
