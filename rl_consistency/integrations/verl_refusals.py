"""Options of verl that are not covered, refused by name before any model is built."""

from __future__ import annotations

from typing import Any

from rl_consistency.integrations.refusals import Covered, setting

_DTYPES = ("bf16", "bfloat16", "fp32", "float32")

TRAINED: Covered = {
    "engine.strategy": ("fsdp2", "set actor.strategy and ref.strategy to fsdp2"),
    "engine.ulysses_sequence_parallel_size": (1, "one process computes a sequence: set 1"),
    "engine.qat.enable": (False, "no order covers quantized weights: set False"),
    "engine.mixed_precision.param_dtype": (_DTYPES, "set it to bf16 or fp32"),
    "model.use_fused_kernels": (False, "they sum in another order: set False"),
    "model.use_liger": (False, "its kernels replace the patched ones: set False"),
    "model.tiled_mlp.enabled": (False, "it cuts the patched MLP into parts: set False"),
    "model.enable_activation_offload": (False, "set enable_gradient_checkpointing instead"),
    "model.lora_rank": (0, "train the whole model: set 0"),
    "model.lora.rank": (0, "train the whole model: set 0"),
    "model.lora_adapter_path": (None, "merge the adapter into the model"),
    "model.mtp.enable": (False, "no draft head is covered: set False"),
}
"""Options of the trainer -> what is covered (of a tuple, each), and what to do about another."""

UPDATED: Covered = {
    "engine.model_dtype": (("fp32", "float32"), "the optimizer updates fp32 weights: set fp32")
}
"""The same of an engine that has an optimizer."""

SAMPLED: Covered = {
    "rollout.name": ("vllm", "no other has exact logprobs: set it to vllm"),
    "rollout.top_p": (1.0, "verl trains on the whole distribution: set 1"),
    "rollout.top_k": ((-1, 0), "verl trains on the whole distribution: set -1"),
    "rollout.do_sample": (True, "greedy logprobs are 0: set True"),
    "rollout.repetition_penalty": (1.0, "training has none: set 1"),
    "rollout.logprobs_mode": (
        "processed_logprobs",
        "others are not of the distribution drawn from",
    ),
    "rollout.quantization": (None, "no order covers quantized weights: leave it out"),
    "rollout.qat.enable": (False, "no order covers quantized weights: set False"),
    "rollout.mtp.enable_rollout": (False, "no draft head is covered: set False"),
    "rollout.disaggregation.enabled": (False, "prefill and decode share one cache: set False"),
    "rollout.full_determinism": (False, "vLLM's own invariant kernels would be put in: set False"),
    "rollout.enable_rollout_routing_replay": (False, "the experts are the same already: set False"),
    "rollout.checkpoint_engine.backend": (("naive", "nccl", "nixl", "mooncake"), "set it to naive"),
}
"""The same of the rollout."""


def refuse(covered: Covered, **configs: Any) -> None:
    """ValueError naming an option of verl's configs that has another value than the covered one.
    An option that is missing or None is off."""
    for path, (allowed, remedy) in covered.items():
        found = setting(configs, path)
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        if found is not None and found not in values:
            raise ValueError(f"rl_consistency in verl does not cover {path}={found!r}; {remedy}.")
