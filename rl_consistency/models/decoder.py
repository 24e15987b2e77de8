"""Canonical counterparts of a Hugging Face decoder layer, of the decoder, and of the causal LM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    is_legacy_batchedtensor,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.core.launch import ALIGNMENT as LAUNCH_ALIGNMENT
from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses, ForwardPass
from rl_consistency.models.layer_graphs import LayerGraphs
from rl_consistency.models.modules import (
    CanonicalModule,
    CanonicalRMSNorm,
    LayerCall,
    is_checkpointed_otherwise,
    is_unobserved,
)
from rl_consistency.models.moe import CanonicalMoEBlock, record_forward
from rl_consistency.models.packing import PackedBatch, packed_inputs
from rl_consistency.numerics.settings import verify_settings
from rl_consistency.numerics.strict import current, held


def guarded_backward(
    output: Tensor, forward: tuple[BackwardPasses, ForwardPass] | None = None
) -> Tensor:
    """The output, whose backward is a ValueError in fp16 and with `create_graph=True`, and a
    ConsistencyError under other numeric settings.

    With the `forward` pass that gave the output, a second backward pass of it is a ValueError too,
    and one that began with another forward pass.
    """
    dtype = output.dtype

    def guard(gradient: Tensor | None) -> None:
        if gradient is not None and is_legacy_batchedtensor(gradient):
            raise ValueError(
                "is_grads_batched=True: several gradients in one backward pass are not covered. "
                "Call torch.autograd.grad once for each, with retain_graph=True."
            )
        if dtype == torch.float16:
            raise ValueError(NO_FP16_TRAINING)
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: gradients of gradients are not covered, and would be zero. "
                "Leave it out, or compute that term inside session.stock()."
            )
        verify_settings()
        if forward is not None:
            passes, own = forward
            passes.enter_forward(own)

    if output.requires_grad:
        output.register_hook(guard)
    return output


NO_FP16_TRAINING = (
    "float16 is not covered in training, where gradients would need a loss scale; use "
    "model.to(torch.bfloat16), or score under torch.no_grad()."
)


def refuse_selective_checkpointing() -> None:
    """ValueError where checkpointing keeps the results of some ops (`context_fn`)."""
    # What is computed again takes them by their number. But the first pass also computes what later
    # ones find, layouts and comparisons with libraries; so it would take others, unseen.
    modes = _get_current_dispatch_mode_stack()
    if any(type(mode).__module__ == checkpoint.__module__ for mode in modes):
        raise ValueError(
            "selective checkpointing (a context_fn that keeps the results of some ops) would give "
            "wrong gradients here. Leave context_fn out: checkpointing of whole layers is covered."
        )


class CanonicalDecoderLayer(CanonicalModule):
    """A decoder layer; residual additions are one op with the norms that follow them."""

    input_layernorm: CanonicalRMSNorm
    self_attn: nn.Module
    post_attention_layernorm: CanonicalRMSNorm
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *, call: LayerCall, cache_index: int) -> Tensor:
        """Hidden states [1, R, H] after attention and MLP; see `CanonicalAttention`."""
        # Gradient checkpointing comes here again, perhaps in a thread of autograd.
        same = call.choice is current()
        with nullcontext() if same else held(call.choice):
            total, addend = self.terms(hidden_states, None, call=call, cache_index=cache_index)
            return total + addend

    def terms(
        self,
        total: Tensor,
        addend: Tensor | None,
        *,
        call: LayerCall,
        cache_index: int,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of the layer's output, for an input `total + addend` (None: `total`).

        `rows` [n] int64 are those wanted, as [1, n, H]; None: all, and for experts nothing else.
        """
        refuse_selective_checkpointing()
        norm = self.input_layernorm
        if addend is None:
            normed = norm(total)
        else:
            normed, total = norm.after_addition(addend, total)
        # By name, as the stock layer passes it: hooks tell the two apart.
        given: dict[str, Any] = {"hidden_states": normed, "call": call, "cache_index": cache_index}
        if rows is not None:
            given["rows"], total = rows, total.index_select(1, rows)
        attended, _ = self.self_attn(**given)
        normed, total = self.post_attention_layernorm.after_addition(attended, total)
        routed = {"call": call} if isinstance(self.mlp, CanonicalMoEBlock) else {}
        return total, self.mlp(normed, **routed)

    def is_plain(self) -> bool:
        """Whether nothing sees the layer's input and output, so that `terms` may stand for a call
        of it: no hook, wrapper or gradient checkpointing, torch's without gradients excepted."""
        # That would spare nothing, and read random states that a CUDA graph must not.
        checkpointed = getattr(self, "gradient_checkpointing", False) and self.training
        if checkpointed and (torch.is_grad_enabled() or is_checkpointed_otherwise(self)):
            return False
        return is_unobserved(self, GradientCheckpointingLayer.__call__)


class CanonicalBaseModel(CanonicalModule):
    """The decoder without its head: packs any form of batch, and unpacks the result."""

    embed_tokens: nn.Embedding
    layers: Any
    norm: CanonicalRMSNorm
    rotary_emb: nn.Module
    guard: Callable[[], Any]
    """Raises unless the whole model is as it was patched; gives the state of the forward."""
    passes: BackwardPasses
    layer_graphs: LayerGraphs | None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states [B, L, H] after the final norm, zeros at padding."""
        batch = packed_inputs(input_ids, attention_mask, position_ids, kwargs)
        hidden = self.batch_forward(batch.packed)
        output = BaseModelOutputWithPast(last_hidden_state=batch.unpack(hidden))  # type: ignore[arg-type]
        is_dict = kwargs.get("return_dict", self.config.return_dict) is not False
        return output if is_dict else output.to_tuple()

    def batch_forward(self, batch: PackedBatch) -> Tensor:
        """Hidden states [R, H] of a batch of R rows; ValueError on ids outside the vocabulary."""
        batch.require_vocabulary(self.embed_tokens.num_embeddings)
        return self.packed_forward(batch.input_ids, batch.position_ids, batch.layout)

    @torch.compiler.disable()  # a compiler would rewrite the ops, with other bytes on a CPU
    def packed_forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: AttentionLayout,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [R, H] of packed rows [R]; rollout and training both come through here.

        `rows` [n] int64 are those wanted, as [n, H]: what follows the last layer's attention is
        then computed for these alone, unless something sees that layer.
        """
        # Rollouts have their guard once, in the engine, and not at every step.
        state = self.guard() if isinstance(layout, PackedSequences) else None
        hidden = self.embed_tokens(input_ids.unsqueeze(0))
        longest = max(layout.context_lens, default=0)
        cos_sin = self.rotary_emb(hidden, position_ids.unsqueeze(0), longest)
        call = LayerCall(cos_sin, layout)
        layers: Any = list(enumerate(self.layers))
        if compiles_only():
            layers = _one_of_each_kind(self.layers)
        if all(layer.is_plain() for _, layer in layers):
            last, graphs = layers[-1][1], self.layer_graphs
            # A pass that compiles runs one layer of each kind, of all rows; those of a smaller call
            # compile for the wanted ones.
            whole = compiles_only() or any(isinstance(m.mlp, CanonicalMoEBlock) for _, m in layers)
            if state is not None and graphs is not None and rows is None and not whole:
                normed = graphs.run([*self.layers, self.norm], self._run, hidden, call, state)
            else:
                early = None if rows is None or whole or self._is_seen_after(last) else rows
                normed = self._run(hidden, call, layers, early)
                rows = rows if early is None else None
        else:
            for index, layer in layers:
                hidden = layer(hidden, call=call, cache_index=index)
            normed = self.norm(hidden)
        found = normed[0] if rows is None else normed[0].index_select(0, rows)
        forward = self.passes, ForwardPass()
        record_forward(forward)
        return guarded_backward(found, forward)

    def _run(
        self, hidden: Tensor, call: LayerCall, layers: Any = None, rows: Tensor | None = None
    ) -> Tensor:
        """The layers and the final norm, where nothing sees a layer's input and output."""
        addend: Any = None
        *before, (last_index, last) = layers or enumerate(self.layers)
        for index, layer in before:
            hidden, addend = layer.terms(hidden, addend, call=call, cache_index=index)
        hidden, addend = last.terms(hidden, addend, call=call, cache_index=last_index, rows=rows)
        return self.norm.after_addition(addend, hidden)[0]

    def _is_seen_after(self, layer: CanonicalDecoderLayer) -> bool:
        """Whether a hook sees rows from the layer's attention on."""
        parts = (layer.self_attn, layer.post_attention_layernorm, layer.mlp, self.norm)
        return not all(is_unobserved(module) for part in parts for module in part.modules())


def _one_of_each_kind(layers: nn.ModuleList) -> list[tuple[int, nn.Module]]:
    """The first of the layers that launch the same kernels, with its index."""
    kinds: dict[tuple[Any, ...], tuple[int, nn.Module]] = {}
    for index, layer in enumerate(layers):
        weights = tuple(
            (name, p.dtype, p.shape, p.stride(), p.data_ptr() % LAUNCH_ALIGNMENT)
            for name, p in layer.named_parameters()
        )
        window = getattr(layer.self_attn, "window", None)
        kinds.setdefault((type(layer), window, weights), (index, layer))
    return list(kinds.values())


class CanonicalCausalLM(CanonicalModule):
    """The decoder with its LM head as a linear map; logits are rounded to the model dtype."""

    model: CanonicalBaseModel
    lm_head: nn.Module
    answer: Callable[..., Any] | None = None
    """Takes the calls with labels, this policy first; `rl_consistency.attach` sets it."""

    @torch.compiler.disable()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        *,
        run: Callable[[], tuple[Tensor, ...]] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, L, V] (or of the last `logits_to_keep` columns), zeros at padding; with `run`,
        what it returns (see `sharding.through`); with labels, what a trainer's `answer` returns."""
        if run is not None:
            return run()
        if self.answer is not None and kwargs.get("labels") is not None:
            return self.answer(self, input_ids, attention_mask, position_ids, **kwargs)
        if not isinstance(logits_to_keep, int):
            raise ValueError(
                f"logits_to_keep is a {type(logits_to_keep).__name__}; give the number of last "
                "positions (0: all), or use rl_consistency.token_logprobs for those of others."
            )
        batch = packed_inputs(input_ids, attention_mask, position_ids, kwargs)
        hidden = self.model.batch_forward(batch.packed)
        logits = batch.unpack(self.lm_head(hidden))[:, -logits_to_keep:]
        output = CausalLMOutputWithPast(logits=guarded_backward(logits))  # type: ignore[arg-type]
        is_dict = self.config.return_dict if return_dict is None else return_dict
        return output if is_dict else output.to_tuple()
