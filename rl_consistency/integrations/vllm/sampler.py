"""The distribution, the draw and the logprobs of this library in the place of vLLM's sampler."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.rollout.device.random_stream import device_uniforms, stream_keys


class ModelState(DefaultModelState):
    """vLLM's state of a model, with the sampler below."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        return Sampler(sampler), None

    def preprocess_state(self, input_batch: Any, *_: Any) -> None:
        self.model.begin_step(input_batch.num_computed_tokens_np)


class Sampler:
    """Draws with the random stream of a request's seed, and of `prompt_id` and `sample_index` in
    its `extra_args`."""

    def __init__(self, base: Any) -> None:
        self._base, count = base, base.sampling_states.max_num_reqs
        self._keys = np.zeros((count, 5), dtype=np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def add_request(self, index: int, prompt_len: int, params: Any) -> None:
        self._base.add_request(index, prompt_len, params)
        extra = params.extra_args or {}
        seed = int(self._base.sampling_states.seeds.np[index]) % 2**64
        of = [extra.get("prompt_id", 0)], [extra.get("sample_index", 0)]
        self._keys[index] = stream_keys([seed], *of)[0]

    def __call__(self, logits: Tensor, batch: Any) -> SamplerOutput:
        states, on_host = self._base.sampling_states, batch.idx_mapping_np
        rows = SamplingRows(
            **{
                name: self._on_device(getattr(states, name).np[on_host], logits)
                for name in ("temperature", "top_p", "min_p")
            },
            top_k=self._on_device(
                np.where(states.top_k.np < states.vocab_size, states.top_k.np, 0)[on_host], logits
            ).long(),
        )
        behaviour = distribution(logits, rows)
        positions = batch.positions[batch.logits_indices]
        keys = self._on_device(self._keys[on_host], logits)
        tokens = behaviour.draw(device_uniforms(keys, positions + 1))
        logprobs = behaviour.logprobs_of(tokens)
        ranks = (logits > logits.gather(1, tokens.unsqueeze(1))).sum(dim=1) + 1
        tensors = None
        if states.max_num_logprobs(on_host) >= 0:
            tensors = LogprobsTensors(tokens.unsqueeze(1), logprobs.unsqueeze(1), ranks)
        sampled, rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self._base.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens.view(-1, 1),
            logprobs_tensors=tensors,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )

    @staticmethod
    def _on_device(values: np.ndarray, like: Tensor) -> Tensor:
        return torch.from_numpy(values.copy()).to(like.device, non_blocking=True)
