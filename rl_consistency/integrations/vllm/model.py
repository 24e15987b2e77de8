"""One model class of vLLM for all families: it holds the patched Hugging Face model.

vLLM keeps its scheduler, blocks, prefix cache, graphs and server. It calls the model through the
names below, and the model runs `paged_hidden_states` over vLLM's memory.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry

from rl_consistency.integrations.vllm.cache import CacheLayer
from rl_consistency.integrations.vllm.requests import install_refusals
from rl_consistency.integrations.vllm.sampler import ModelState
from rl_consistency.integrations.vllm.settings import CanonicalConfig, refuse
from rl_consistency.integrations.vllm.sleep import watch_sleep
from rl_consistency.integrations.vllm.start import compile_kernels
from rl_consistency.integrations.vllm.steps import CacheViews, DecodeLayouts, Step
from rl_consistency.integrations.vllm.weights import (
    begin_step,
    digest,
    digests,
    load_weights,
    touch,
    watch,
)
from rl_consistency.kernels.attention.layout import CapturedPagedAttention, PackedSequences
from rl_consistency.kernels.attention.op import attention_paged
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.families import FAMILIES
from rl_consistency.models.forward import (
    cache_sizes,
    next_token_logits,
    paged_hidden_states,
    rotary_rows,
)
from rl_consistency.models.moe import recorded_routing
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.numerics.settings import verify_settings

_log = logging.getLogger(f"vllm.{__name__}")  # for vLLM's handlers

ARCHITECTURES = tuple(f"{prefix}ForCausalLM" for prefix in FAMILIES.values())


def register_models() -> None:
    """Let vLLM make the class below for every architecture that is covered, and know no other,
    now or later: their models would not be exact. It refuses other requests, too."""
    for name in set(ModelRegistry.models) - set(ARCHITECTURES):
        del ModelRegistry.models[name]
    for name in ARCHITECTURES:
        type(ModelRegistry).register_model(ModelRegistry, name, CanonicalForCausalLM)
        MODELS_CONFIG_MAP[name] = CanonicalConfig
    ModelRegistry.register_model = _pass_over  # for plug-ins that vLLM loads behind this one
    install_refusals()


def _pass_over(model_arch: str, model_cls: Any) -> None:
    _log.warning("rl_consistency: %s is not served by %s.", model_arch, model_cls)


@eager_break_during_capture  # between two graphs, where prefill runs through breakable ones
def attend(model: CanonicalForCausalLM, q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Tensor:
    """Attention [T, H, D] of the step at hand; rows of padding keep what they hold."""
    layer, scale, window = where
    out = model.attended[: len(q)]
    scores: Any = {"scale": scale, "window": window, "new": (k, v)}
    for layout in get_forward_context().attn_metadata[model.names[layer]].layouts(model.cache):
        if q.is_cuda:
            attention_paged(q, layout, layer, **scores, out=out)
        else:  # where a call writes all rows
            rows = layout.rows()
            out[rows] = attention_paged(q, layout, layer, **scores)[0][rows]
    return out


class CanonicalForCausalLM(nn.Module):
    """The patched model, `hf`, behind vLLM's interface of a text model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        refuse(vllm_config)
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        config._attn_implementation = "sdpa"
        # Since 0.31 vLLM unties a head that the checkpoint has too. `load_weights` compares them.
        if getattr(vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False):
            config.tie_word_embeddings = True
        self.hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.hf.to(dtype).eval().requires_grad_(False)
        default = torch.get_default_dtype()  # vLLM's, while it makes a model
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                self.session = patch(self.hf, cuda_graphs=False)
        finally:
            torch.set_default_dtype(default)
        watch(self.hf, from_checkpoint=vllm_config.load_config.load_format != "dummy")
        watch_sleep(vllm_config.model_config)
        layers, kv_heads, head_dim = cache_sizes(self.hf)
        sizes = config.num_attention_heads, kv_heads, head_dim
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        self.caches = [CacheLayer(*sizes, dtype) for _ in self.names]
        layer_of = vllm_config.compilation_config.static_forward_context
        layer_of.update(zip(self.names, self.caches, strict=True))
        self.vllm_config, self.max_len = vllm_config, vllm_config.model_config.max_model_len
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._decode = DecodeLayouts(self.max_len)
        self._angles: Tensor | None = None
        self._withdrawals = audit.withdrawals()

    def get_model_state_cls(self) -> type[ModelState]:
        return ModelState

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.hf.get_input_embeddings()(input_ids.long())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] of a step's tokens [T] int32 at positions [T] int64."""
        if inputs_embeds is not None:
            raise ValueError("rl_consistency in vLLM: prompts as embeddings are not covered.")
        context, tokens = get_forward_context(), input_ids.long()
        if self._angles is None:
            self._prepare()
        if context.attn_metadata is None:  # vLLM measures memory, before there is a cache
            return paged_hidden_states(self.hf, tokens, positions, self._prompts(len(tokens)))
        step: Step = context.attn_metadata[self.names[0]]
        whole = step.for_capture and step.is_decode
        whole = whole and context.cudagraph_runtime_mode == CUDAGraphMode.NONE
        with certified_to_the_row() if step.for_capture else nullcontext():
            # vLLM warms up alike what it captures whole and what it captures around attention.
            if not (whole and tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
                used, slots = step.used(), step.slots()
                layout = CapturedPagedAttention.interrupted(
                    partial(attend, self), used, slot_mapping=slots, **self.cache()
                )
                hidden = self._run(tokens, positions, layout)
            if whole:
                hidden = self._run(tokens, positions, self._decode.layout(step, self.cache()))
        return hidden

    def _run(self, tokens: Tensor, positions: Tensor, layout: CapturedPagedAttention) -> Tensor:
        with recorded_routing() as record:
            hidden = paged_hidden_states(self.hf, tokens, positions, layout)
        for numbers in record.fingerprints():
            self._routing[:, : len(tokens)] = torch.stack([numbers, tokens, positions])
            self._routed.copy_(layout.numbers.tokens.sum())
        return hidden

    def _prepare(self) -> None:
        """Compile kernels, and make what graphs read by address, while vLLM measures memory."""
        self._angles = rotary_rows(self.hf, self.max_len)
        size, weight = self.caches[0], self.hf.get_input_embeddings().weight
        # One memory for attention of all graphs and outside theirs: padding in it stays finite.
        shape = self._max_tokens, size.num_heads, size.head_dim
        self.attended = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._routing = torch.zeros(3, self._max_tokens, dtype=torch.int64, device=weight.device)
        self._routed = torch.zeros((), dtype=torch.int64, device=weight.device)
        compile_kernels(self.hf, self.vllm_config)

    def _prompts(self, tokens: int) -> Any:
        """Whole prompts of as many tokens."""
        starts = range(0, tokens, self.max_len)
        return PackedSequences.of(starts, [min(self.max_len, tokens - s) for s in starts])

    def cache(self) -> CacheViews:
        """Where keys and values of all layers lie, without slots."""
        keys, values = zip(*(cache.keys_and_values for cache in self.caches), strict=True)
        return {"key_cache": keys, "value_cache": values, "block_size": keys[0].shape[1]}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [n, V] fp32 of hidden states [n, H]; ConsistencyError under other settings."""
        verify_settings()
        return next_token_logits(self.hf, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors by name; the names that were loaded, as vLLM counts them."""
        return load_weights(self.hf, weights)

    def get_submodule(self, target: str) -> nn.Module:
        """vLLM asks for one to write to its parameters, in a reload that is no checkpoint's."""
        touch(self.hf)
        return super().get_submodule(target)

    def begin_step(self, computed: Sequence[int]) -> None:
        """Before a step of requests with so many cached tokens [requests]; see `weights`."""
        begin_step(self.hf, self.caches, computed)

    def digest(self) -> str:
        """What `rl_consistency.model_digest` gives of a trained model with these weights.

        ConsistencyError where a library product was found to differ since the start: graphs hold
        it, and only a new start drops them.
        """
        audit.withdrawals()
        if withdrawn := audit.withdrawn_since(self._withdrawals):
            raise ConsistencyError(
                f"products of the vendor library differ from ours: {', '.join(withdrawn)}. Start "
                "vLLM again; what it gave since its start may not be exact."
            )
        return digest(self.hf)

    def digests(self) -> dict[str, str]:
        """A digest of each parameter."""
        return digests(self.hf)

    def routing(self) -> Tensor:
        """[3, tokens] int64 on the host, of a mixture's last step: the routing of each token (see
        `moe.expert_fingerprints`), its id and its position; no column in a dense model."""
        return self._routing[:, : int(self._routed)].cpu()

    def fingerprint(self) -> dict[str, str]:
        """The entries of `rl_consistency.fingerprint` in this process."""
        return fingerprint(self.hf.device).entries
