"""What of vLLM's configuration the plug-in sets where a user gave nothing, and what it refuses.

vLLM asks the class below once for each engine, in the user's process, before it fills in defaults
of its own. The model refuses again, in the worker.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from rl_consistency.models.families import SPARSE
from rl_consistency.rollout.device.decode_graphs import buckets_up_to as decode_buckets
from rl_consistency.rollout.device.ragged_graphs import buckets_up_to as prompt_buckets
from rl_consistency.rollout.device.ragged_graphs import most_rows

LOGPROBS = "processed_logprobs"
"""vLLM's name for logprobs of the distribution that tokens are drawn from."""


LOAD_FORMATS = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
    *("npcache", "pt", "mistral", "dummy"),
)
"""vLLM's ways to read a checkpoint that hand its tensors to `load_weights`, and no weights. Others
write to the parameters: a dtype or shape that does not fit would be cast or cut."""


class CanonicalConfig(VerifyAndUpdateConfig):
    """vLLM's hook for the configuration of an architecture."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """`processed_logprobs`; ValueError where logits are asked for."""
        if model_config.logprobs_mode not in (LOGPROBS, "raw_logprobs"):
            raise ValueError(
                f"logprobs_mode={model_config.logprobs_mode!r}: rl_consistency gives the logprobs "
                f"of the distribution that tokens are drawn from; use {LOGPROBS!r}."
            )
        model_config.logprobs_mode = LOGPROBS  # the other is vLLM's default, and cannot be told

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Numbers of rows to capture, unless given; ValueError for what is not covered."""
        refuse(vllm_config)
        graphs, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
        if graphs.cudagraph_capture_sizes is None and graphs.max_cudagraph_capture_size is None:
            graphs.cudagraph_capture_sizes = capture_sizes(
                vllm_config.model_config.hf_config,
                scheduler.max_num_batched_tokens,
                scheduler.max_num_seqs,
            )


def capture_sizes(config: Any, max_tokens: int, max_seqs: int) -> list[int]:
    """Numbers of rows to capture: those of decode steps, and of prompts as far as the host would
    take longer than the GPU."""
    prompts = prompt_buckets(min(max_tokens, most_rows(row_parameters(config))))
    return sorted({min(rows, max_tokens) for rows in (*decode_buckets(max_seqs), *prompts)})


def row_parameters(config: Any) -> int:
    """Parameters that a row meets in a layer."""
    hidden, width = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    if config.model_type in SPARSE:
        width = getattr(config, "moe_intermediate_size", width) * config.num_experts_per_tok
    return hidden * (head_dim * heads + 3 * width)


def refuse(vllm_config: Any) -> None:
    """ValueError naming each setting of vLLM that is not covered, and what to do."""
    found = list(_refused(vllm_config))
    if found:
        raise ValueError(f"rl_consistency in vLLM: {'; '.join(found)}.")


def _refused(vllm_config: Any) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in (
        *("tensor_parallel_size", "pipeline_parallel_size"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
    ):
        if (size := getattr(parallel, name)) > 1:
            yield f"{name}={size} (covered: 1; use more GPUs by more servers)"
    for name in ("enable_expert_parallel", "enable_dbo"):
        if getattr(parallel, name):
            yield f"{name} (leave it out)"
    if vllm_config.quant_config is not None or model.quantization is not None:
        yield f"quantization {model.quantization!r} (load the model unquantized)"
    dtype, cache = str(model.dtype).removeprefix("torch."), vllm_config.cache_config
    if cache.cache_dtype not in ("auto", dtype):
        yield f"kv_cache_dtype={cache.cache_dtype!r} (covered: auto, the model's dtype)"
    if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        yield "keys from a connector, which no step here has computed (leave kv_transfer out)"
    transfer = vllm_config.weight_transfer_config
    if transfer is not None and transfer.backend not in ("nccl", "ipc"):
        yield f"weights by {transfer.backend!r}, past load_weights (covered: nccl, ipc)"
    if (given := vllm_config.load_config.load_format) not in LOAD_FORMATS:
        yield f"load_format={given!r} (covered: {', '.join(LOAD_FORMATS)})"
    if vllm_config.lora_config is not None:
        yield "LoRA (merge the adapter into the weights)"
    if vllm_config.speculative_config is not None:
        yield "speculation (leave speculative_config out)"
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r} (covered: generate)"
    if model.model_impl not in ("auto", "vllm"):
        yield f"model_impl={model.model_impl!r}, which has a model of its own (leave it out)"
    outputs = getattr(vllm_config, "aux_output_config", model)  # since 0.31
    for owner, name in (
        (model, "enable_prompt_embeds"),
        (model, "logits_processors"),
        (model, "model_class_overrides"),
        *((model, name) for name in ("return_sampling_mask", "enable_trace_replay")),  # since 0.31
        (outputs, "enable_return_routed_experts"),
        (vllm_config, "watermark_config"),  # since 0.31
    ):
        if getattr(owner, name, None):
            yield f"{name} (leave it out)"
    if found := [each.name for each in entry_points(group="vllm.logits_processors")]:
        yield f"logits processors of installed packages: {', '.join(found)} (uninstall them)"
    if model.multimodal_config is not None:
        yield "a multimodal model (covered: text alone)"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        yield "VLLM_BATCH_INVARIANT, which replaces products of torch (unset it)"
    if not vllm_config.use_v2_model_runner:
        yield "VLLM_USE_V2_MODEL_RUNNER=0, whose runner keeps vLLM's sampler (leave it out)"
