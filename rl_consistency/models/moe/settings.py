"""Which settings of a mixture of experts no canonical order covers, and parallel experts."""

from __future__ import annotations

from typing import Any

from torch import nn


def num_experts(config: Any) -> int:
    """Experts of a sparse layer; Mixtral has a name of its own for it."""
    return config.num_local_experts if config.model_type == "mixtral" else config.num_experts


def normalizes(config: Any) -> bool:
    """Whether routers divide the chosen weights by their sum; Mixtral's always do, unasked."""
    return config.model_type == "mixtral" or config.norm_topk_prob


def routing_problems(config: Any) -> list[str]:
    """Settings of a sparse family's configuration that are not covered, with what to do."""
    found = []
    if jitter := getattr(config, "router_jitter_noise", 0.0):
        found.append(f"router_jitter_noise={jitter} (set it to 0.0)")
    if (clip := getattr(config, "clip_qkv", None)) is not None:
        found.append(f"clip_qkv={clip} (covered: None)")
    if getattr(config, "output_router_logits", False):
        found.append(
            "output_router_logits=True, whose auxiliary loss is no sum over sequences: every cut "
            "of the batch changes it (set it to False; trainers know algorithm.balance_coefficient)"
        )
    if config.model_type == "olmoe" and (window := getattr(config, "sliding_window", None)):
        found.append(f"sliding_window={window}, which some attention functions ignore")
    if (step := getattr(config, "decoder_sparse_step", 1)) < 1:
        found.append(f"decoder_sparse_step={step} (covered: 1 or more)")
    if getattr(config, "mlp_only_layers", ()) is None:
        found.append("mlp_only_layers=None (give the list of dense layers, which may be empty)")
    experts, chosen = num_experts(config), config.num_experts_per_tok
    # Without experts a Qwen3-MoE has dense layers alone; the others have no other layers.
    dense = not experts and config.model_type == "qwen3_moe"
    if not dense and not 1 <= chosen <= experts:
        found.append(f"num_experts_per_tok={chosen} of {experts} experts")
    return found


def parallel_part(model: nn.Module) -> str | None:
    """The first module that other ranks have a part of by a plan of transformers; None for none."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return "root"
    planned = (
        name
        for name, module in model.named_modules()
        if vars(module).get("_is_expert_parallel") or vars(module).get("_hf_tp_plan")
    )
    return next(planned, None)
