"""The works of a policy: every product of its weights, for 1 row up to a training batch.

Rollouts run each layer for the rows of a decode step, and for the rows of a prefill. Training runs
it forward and backward for the rows of a micro-batch. Rows come in buckets, as picks look them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.core.tuned_schedules import MOST_ROWS, rows_bucket
from rl_consistency.kernels.matmul.schedules import FUSED_ROWS
from rl_consistency.models.families import ACTIVATIONS, check_config
from rl_consistency.models.sharding import unwrapped
from rl_consistency.tuning.products import (
    TUNED_COLUMNS,
    fold,
    fused_gate_up,
    fused_qkv,
    product,
)
from rl_consistency.tuning.work import Work

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
    if rows < 1:
        raise ValueError(f"rows={rows}: a training batch has at least 1 row.")
    works = filter(_has_aligned_rows, _works(config, dtype, device, rows))
    found = {work.entry: work for work in works}
    return sorted(found.values(), key=lambda work: -work.seconds)


def policy_config(model: nn.Module) -> tuple[Any, torch.dtype]:
    """The configuration and the dtype of a model, under any wrapper."""
    policy = unwrapped(model)
    config = getattr(policy, "config", None)
    parameter = next(policy.parameters(), None)
    if config is None or parameter is None:
        raise TypeError(
            f"tune takes a Hugging Face causal LM, got {type(model).__name__}; give the model "
            "that is patched."
        )
    return config, parameter.dtype


def _buckets(rows: int) -> list[int]:
    return sorted({rows_bucket(m) for m in (1, *(2**i for i in range(15)), rows) if m <= rows})


def _works(config: Any, dtype: torch.dtype, device: torch.device, rows: int) -> Iterator[Work]:
    hidden, inner, layers = (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers,
    )  # fmt: skip
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    columns = tuple(
        heads * head_dim
        for heads in (
            config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads,
        )
    )  # fmt: skip
    activation = ACTIVATIONS[getattr(config, "hidden_act", "silu")]
    own = ((hidden, columns[0]), (hidden, inner))
    fusable = (*((n, hidden) for n in columns), (inner, hidden), (inner, hidden))
    for m in _buckets(rows):
        times = layers * (DECODE_STEPS if m <= DECODE_ROWS else 1)
        if fused := m <= FUSED_ROWS:
            yield fused_qkv(device, m, columns, hidden, dtype, times)
            yield fused_gate_up(device, m, inner, hidden, dtype, activation, times)
        for (n, k), count in _counted(own if fused else (*own, *fusable)):
            yield product(device, "nt", m, n, k, dtype, dtype, times * count)
        if m <= DECODE_ROWS:
            head = m, config.vocab_size, hidden
            yield product(device, "nt", *head, dtype, torch.float32, DECODE_STEPS)
        if m >= min(LEAST_TRAINING_ROWS, rows):
            for (n, k), count in _counted((*own, *fusable)):
                yield product(device, "nn", m, k, n, dtype, dtype, layers * count)
                yield fold(device, m, n, k, dtype, layers * count)
    # The LM head's gradients come in chunks of tokens.
    chunk = min(max(128, hidden // 128 * 128), rows_bucket(rows))
    calls = rows / chunk
    yield product(device, "nn", chunk, hidden, config.vocab_size, dtype, dtype, calls)
    yield fold(device, chunk, config.vocab_size, hidden, dtype, calls)


def _has_aligned_rows(work: Work) -> bool:
    """Whether descriptors and the library can address the weights; others keep the op's rule."""
    sizes = f"{work.shape['n']}+{work.shape['k']}".split("+")
    return all(int(size) % TUNED_COLUMNS == 0 for size in sizes)


def _counted(shapes: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], int]]:
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    for shape in shapes:
        counts[shape] += 1
    return list(counts.items())
