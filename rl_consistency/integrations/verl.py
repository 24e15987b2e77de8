"""verl's trainer with exact logprobs: `model.external_lib=rl_consistency.integrations.verl`.

verl imports the module in each of its processes. It puts a patched model into the trainer's engine,
and into the vLLM servers that sample (`verl_rollout.py`, `verl_server.py`). See docs/verl.md.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import verl
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree
from verl.workers.rollout import base, replica

from rl_consistency.integrations.verl_refusals import TRAINED, UPDATED, refuse
from rl_consistency.integrations.verl_weights import with_digests
from rl_consistency.models.packing import PackedBatch, from_host
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.patched import replaced
from rl_consistency.rollout.sampling_params import SamplingParams

VERSIONS = ("0.9.1",)
"""Versions of verl whose seams were read."""

_STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel")
"""All of verl's: none may run stock without a word."""

_UNSCORED = ("calculate_sum_pi_squared", "distillation_use_topk")
"""Outputs that are sums over the vocabulary which no order covers."""


class Engine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine over a patched model: its logprobs are those of `token_logprobs`."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(TRAINED, model=model_config, engine=engine_config)
        refuse({} if engine_config.forward_only else UPDATED, engine=engine_config)
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_module(self) -> nn.Module:
        # verl asks for flash_attention_2, whose package would have to be there to be replaced.
        self.model_config.hf_config._attn_implementation = "sdpa"
        module = super()._build_module()
        # All ranks but one have no values yet: verl sends them once the model is sharded.
        module._apply(lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x)
        self.session = patch(module)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        # verl gathers an untied LM head when it is called, and scoring reads its weight. As one of
        # a tied pair it belongs to the root, which is gathered for the whole pass.
        with replaced(module.config, "tie_word_embeddings", True):
            return super()._build_fsdp_module(module)

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """verl's loop over micro-batches. With autograd's own threads, Python functions of a
        patched model would run on two cores in turn, each with a cold cache."""
        with torch.autograd.set_multithreading_enabled(False):
            return super().forward_backward_batch(*args, **kwargs)

    def forward_step(
        self, micro_batch: Any, loss_function: Any, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss and outputs of a micro-batch as verl's own gives them, without autocast."""
        micro_batch = micro_batch.to(get_device_id())
        output, metrics = self.prepare_model_outputs(None, None, micro_batch, None), {}
        loss = torch.ones(())
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=group)
        found = {"model_output": detach_tree(output), "loss": loss.item(), "metrics": metrics}
        return loss, found

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Jagged fp32 [B, length] `log_probs` and, if asked for, `entropy`: column j is of token
        j + 1, where that is one of the response (of any, in batches without responses), else 0.

        ValueError for outputs that no order covers, and positions that do not count from 0.
        """
        for name in _UNSCORED:
            if get_non_tensor_data(micro_batch, name, False):
                raise ValueError(f"rl_consistency in verl has no order for {name}: set it False.")
        ids: Tensor = micro_batch["input_ids"]
        lens: list[int] = ids.offsets().diff().tolist()
        batch = PackedBatch.from_tokens(ids.values(), lens)
        if not torch.equal(
            micro_batch["position_ids"].values(), batch.position_ids[batch.token_rows]
        ):
            raise ValueError("position_ids must count each sequence from 0: give text only.")
        prompts, sampling = _prompt_lengths(micro_batch, lens), _sampling(micro_batch, len(lens))
        is_empty = prompts == lens  # and a forward pass has to score something
        prompts = [1] * len(lens) if is_empty else prompts
        scored = token_logprobs(self.module, batch, prompt_lengths=prompts, sampling=sampling)
        spans = zip(accumulate(lens), lens, prompts)
        places = [np.arange(end - n + prompt - 1, end - 1) for end, n, prompt in spans]
        index = from_host(np.concatenate(places), ids.device)

        def jagged(scores: Tensor) -> Tensor:
            scores = scores * 0.0 if is_empty else scores
            columns = scores.new_zeros(sum(lens)).index_copy(0, index, scores)
            return torch.nested.nested_tensor_from_jagged(columns, ids.offsets())

        found = {"log_probs": jagged(scored.logprobs)}
        if get_non_tensor_data(micro_batch, "calculate_entropy", False):
            found["entropy"] = jagged(scored.entropy)
        return found

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Names of Hugging Face, and whole weights rounded as a forward pass gathers them, with
        their digests behind them. Every rank reads all of them."""
        weights: dict[str, Tensor] = self.module.state_dict()

        def whole() -> Iterator[tuple[str, Tensor]]:
            for name, shard in weights.items():
                weight = shard.to(get_device_id(), non_blocking=True)
                weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
                yield name, weight.to(self._autocast_dtype)

        return with_digests(whole()), None


def _prompt_lengths(micro_batch: Any, lens: list[int]) -> list[int]:
    responses = micro_batch.get("responses", None)
    if responses is None:
        return [1] * len(lens)
    if responses.is_nested:
        counts = responses.offsets().diff().tolist()
    else:
        counts = micro_batch["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()
    return [n - count for n, count in zip(lens, counts)]


def _sampling(micro_batch: Any, count: int) -> SamplingParams | list[SamplingParams]:
    temperature = micro_batch["temperature"]
    if not isinstance(temperature, Tensor):
        return SamplingParams(temperature=float(temperature))
    return [SamplingParams(temperature=each) for each in temperature.expand(count).tolist()]


def _load_replica() -> type:
    from rl_consistency.integrations.verl_server import Replica

    return Replica


def _register() -> None:
    if (found := verl.__version__) not in VERSIONS:
        raise ImportError(f"verl is {found}, and rl_consistency covers {', '.join(VERSIONS)}.")
    device, vendor = get_device_name(), get_vendor()
    if device not in ("cuda", "cpu") or vendor != "nvidia":
        raise ImportError(f"rl_consistency covers NVIDIA's GPUs, and here is {vendor} {device}.")
    of_vendor = vendor if device == "cuda" else None  # before verl's own, which has no vendor
    EngineRegistry.register("language_model", list(_STRATEGIES), device, of_vendor)(Engine)
    replica.RolloutReplicaRegistry.register("vllm", _load_replica)
    for name, mode in list(base._ROLLOUT_REGISTRY):
        adapter = "rl_consistency.integrations.verl_rollout.Adapter"
        base._ROLLOUT_REGISTRY[name, mode] = adapter


_register()
