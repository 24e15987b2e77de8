"""The works of a sparse layer of a policy: its router and its experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_consistency.models.families import ACTIVATIONS, SPARSE, num_experts
from rl_consistency.tuning.expert_products import expert_fold, expert_product
from rl_consistency.tuning.products import fold, product
from rl_consistency.tuning.work import Work


def sparse_layers(config: Any) -> int:
    """How many layers of a configuration have experts."""
    if config.model_type not in SPARSE or not num_experts(config):
        return 0
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", ())
    return sum(
        (layer + 1) % step == 0 and layer not in (dense or ())
        for layer in range(config.num_hidden_layers)
    )


def sparse_forward(
    config: Any, dtype: torch.dtype, device: torch.device, m: int, calls: float
) -> Iterator[Work]:
    """Router and experts for m rows."""
    hidden, inner, experts, top_k = _sizes(config)
    activation = ACTIVATIONS[getattr(config, "hidden_act", "silu")]
    yield product(device, "nt", m, experts, hidden, dtype, torch.float32, calls)
    sizes = m, top_k, experts
    yield expert_product(device, "gate_up", *sizes, inner, hidden, dtype, activation, calls)
    yield expert_product(device, "nt", *sizes, hidden, inner, dtype, calls=calls)


def sparse_backward(
    config: Any, dtype: torch.dtype, device: torch.device, m: int, calls: float
) -> Iterator[Work]:
    """Gradients of router and experts for a micro-batch of m rows."""
    hidden, inner, experts, top_k = _sizes(config)
    yield product(device, "nn", m, hidden, experts, dtype, dtype, calls)
    yield fold(device, m, experts, hidden, dtype, calls)
    sizes = m, top_k, experts
    yield expert_product(device, "nn", *sizes, inner, hidden, dtype, calls=calls, by_row=True)
    yield expert_product(device, "nn", *sizes, hidden, 2 * inner, dtype, calls=calls)
    yield expert_fold(device, *sizes, 2 * inner, hidden, dtype, calls)
    yield expert_fold(device, *sizes, hidden, inner, dtype, calls, dy_by_row=True)


def _sizes(config: Any) -> tuple[int, int, int, int]:
    """Hidden and inner width, experts, and experts of a row."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return config.hidden_size, inner, num_experts(config), config.num_experts_per_tok
