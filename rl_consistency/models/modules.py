"""Canonical counterparts of the modules a Hugging Face decoder is made of.

`families.canonical_class` puts each class in front of the exact Hugging Face class, so `super()` is
the stock path. Inside a patched model hidden states are packed rows [1, R, ...]
(`packing.PackedBatch`).
"""

from __future__ import annotations

import copyreg
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._autograd import (  # pyright: ignore[reportMissingImports]
    _top_saved_tensors_default_hooks,
)
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import output_capturing

from rl_consistency.kernels.attention.layout import (
    AttentionLayout,
    CapturedPagedAttention,
    PackedSequences,
    PagedAttention,
)
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.attention.paged_cache_triton import HeadNorms, paged_inputs, write_cache
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.op import glu_linear, linear, linear_glu, linear_qkv
from rl_consistency.kernels.pointwise.embedding import embedding
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_table
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm
from rl_consistency.models.installed_code import written_in
from rl_consistency.models.stock import stock_attention, stock_captured_attention
from rl_consistency.numerics.strict import Strictness, current, is_canonical

ADDED = {
    *("_gradient_buffers", "rows_per_token", "activation", "normalizes", "window", "answer"),
    *("apply_stock_rotary", "_rotary_table", "rope_settings", "guard", "passes", "sharded"),
    "layer_graphs",
}
"""Attributes that a patched module has and a stock one has not."""

STOCK_CLASS = "_stock_class"
"""Name under which a canonical class keeps the class that it stands for."""

_ENABLE = PreTrainedModel.enable_input_require_grads
_INSTALL = output_capturing.install_output_capuring_hook

TABLE_POSITIONS = 1024  # positions of the first rotary table; it grows by doubling


class CanonicalModule(nn.Module):
    """Base of the mixins; `patch` attaches the gradient buffers and `restore` removes them."""

    if TYPE_CHECKING:
        _gradient_buffers: dict[str, GradientBuffer]
        weight: Tensor
        config: Any

    sharded: bool = False
    """Whether FSDP2 gathers the module's parameters, into others than those it keeps."""
    op: str = ""
    """The op this module runs in, by its name in `numerics.strict.OPS`; empty for containers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, whether by `copy` or by pickle, is the stock module with copied parameters."""
        stock = vars(type(self)).get(STOCK_CLASS)
        if stock is None:  # another library made a class of this one
            return super().__reduce_ex__(protocol)
        state = {name: value for name, value in vars(self).items() if name not in ADDED}
        rebuild = copyreg._reconstructor  # pyright: ignore[reportAttributeAccessIssue]
        return rebuild, (stock, object, None), state

    def __copy__(self) -> Any:
        raise ValueError(
            f"a shallow copy of a patched {type(self).__name__} would share its patched parts; "
            "copy.deepcopy gives a stock copy, and session.stock() or restore() the stock model."
        )

    def gradient_buffer(self, name: str) -> GradientBuffer | None:
        """The buffer that the gradient of one of the module's parameters is folded into.

        None while any op is stock: no bits are promised then, and autograd adds up the gradients.
        """
        buffer, parameter = self._gradient_buffers.get(name), getattr(self, name)
        if buffer is None:
            return None
        if buffer.parameter is not parameter:
            if not self.sharded:
                found = f"{type(self).__name__}.{name}"
                raise ValueError(f"{found} was replaced after patch(); restore and patch again.")
            buffer = buffer.of(parameter)
        return None if current().stock else buffer


class CanonicalLinear(CanonicalModule):
    """`nn.Linear` through the canonical `linear`."""

    op = "linear"
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if not is_canonical("linear"):
            return super().forward(input)
        return linear(input, self.weight, self.bias, **self._gradients())

    def after_glu(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """The canonical linear of `glu(gate, up)`, which the backward pass computes again."""
        return glu_linear(gate, up, self.weight, self.bias, activation, **self._gradients())

    def _gradients(self) -> dict[str, GradientBuffer | None]:
        return {f"{name}_grad": self.gradient_buffer(name) for name in ("weight", "bias")}


def asks_for_gradients(hook: Any) -> bool:
    """Whether a hook is transformers' own that calls `requires_grad_`: gradient checkpointing puts
    one on the embedding each time it is enabled, and leaves it there."""
    return _is_made_by(hook, _ENABLE, "make_inputs_require_grads")


def captures_outputs(hook: Any) -> bool:
    """Whether a hook is transformers' own that collects hidden states, attentions or router logits:
    in the stock forwards that are asked for them, and in no other."""
    return _is_made_by(hook, _INSTALL, "output_capturing_hook")


def _is_made_by(hook: Any, maker: Any, name: str) -> bool:
    """Whether it is the function of this name that `maker`, of transformers, defines inside."""
    inside = f"{maker.__qualname__}.<locals>.{name}"
    return getattr(hook, "__qualname__", "") == inside and written_in(hook) == maker.__module__


def is_checkpointed_otherwise(module: nn.Module) -> bool:
    """Whether a module is checkpointed by another function than torch's, or than transformers'
    around that one. What it does beside, also without gradients, cannot be known."""
    own = vars(module)
    if not own.get("gradient_checkpointing") or not module.training:
        return False
    run = own.get("_gradient_checkpointing_func")
    if type(run) is partial:
        run = run.func
    return run is not checkpoint and written_in(run) != PreTrainedModel.__module__


def all_plain(*modules: nn.Module) -> bool:
    """Whether a call of each module would run the canonical forward and nothing else."""
    return all(type(m).forward in _FUSED_FORWARDS and is_unobserved(m) for m in modules)


def is_unobserved(module: nn.Module, own_call: Any = nn.Module.__call__) -> bool:
    """Whether a call of the module runs the forward of its class, without hooks; `own_call` is the
    `__call__` that its library gave the class."""
    own = vars(module)
    if "forward" in own or own.get("_compiled_call_impl") is not None or _has_any_global_hook():
        return False
    hooked = own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if hooked or type(module).__call__ is not own_call:
        return False
    return all(map(captures_outputs, own["_forward_hooks"].values()))


def _may_fuse(x: Tensor, projections: tuple[CanonicalLinear, ...]) -> bool:
    """Whether projections of one x may run in one launch, with the same bytes: on a GPU, without
    gradients, all of them canonical and plain."""
    inference = x.is_cuda and not torch.is_grad_enabled()
    return inference and is_canonical("linear") and all_plain(*projections)


class CanonicalRMSNorm(CanonicalModule):
    """A Hugging Face RMSNorm through the canonical `rms_norm`."""

    op = "rms_norm"
    variance_epsilon: float
    rows_per_token: int = 1  # heads of one token when the norm is per head, as most qk-norms are

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not is_canonical("rms_norm"):
            return super().forward(hidden_states)
        return rms_norm(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            rows_per_token=self.rows_per_token,
            weight_grad=self.gradient_buffer("weight"),
        )

    def after_addition(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x); the same bytes as the addition, then the norm."""
        if is_canonical("rms_norm") and all_plain(self):
            buffer = self.gradient_buffer("weight")
            return add_rms_norm(x, residual, self.weight, self.variance_epsilon, weight_grad=buffer)
        total = residual + x
        return self(total), total


_FUSED_FORWARDS = (CanonicalLinear.forward, CanonicalRMSNorm.forward)
"""The forwards that fused ops may stand for."""


class CanonicalEmbedding(CanonicalModule):
    """`nn.Embedding` through the canonical `embedding`."""

    op = "embedding"
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        if not is_canonical("embedding"):
            return super().forward(input)
        index = self.padding_idx  # which torch counts from the end where it is negative
        return embedding(
            input,
            self.weight,
            padding_idx=index + len(self.weight) if index is not None and index < 0 else index,
            weight_grad=self.gradient_buffer("weight"),
            # Batches and the engine check their ids; reading them here would wait for the GPU.
            check_ids=not input.is_cuda,
        )


class CanonicalRotaryEmbedding(CanonicalModule):
    """Cosines and sines by position, gathered from one table."""

    op = "rotary"
    rope_type: str
    compute_default_rope_parameters: Any
    attention_scaling: float
    rope_settings: str
    """The config's rotary settings, of which the table is made."""
    _rotary_table: Tensor | None = None

    def forward(
        self, x: Tensor, position_ids: Tensor, num_positions: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, [R, D/2] fp32 each, of ids that are below `num_positions`.

        On the stock path, and without `num_positions`, as another caller calls the module: what
        stock returns, [B, L, D] in the dtype of x.
        """
        if num_positions is None or not is_canonical("rotary"):
            return super().forward(x, position_ids)
        positions = position_ids.flatten()
        table = self.table(num_positions, x.device)
        return table[0, positions], table[1, positions]

    def table(self, num_positions: int, device: torch.device) -> Tensor:
        """[2, rows, D/2] fp32 cosines and sines of at least `num_positions` positions.

        A larger table replaces a smaller one and repeats its bits in the rows they share.
        """
        table = self._rotary_table
        if table is None or table.shape[1] < num_positions or table.device != device:
            rows = TABLE_POSITIONS
            while rows < num_positions:
                rows *= 2
            # From the config: `model.to(dtype)` rounds the module's buffer of frequencies.
            kinds = ROPE_INIT_FUNCTIONS | {"default": self.compute_default_rope_parameters}
            with torch.device("cpu"):  # whatever device the model was built under
                frequencies = kinds[self.rope_type](self.config)[0].to(device)  # [D/2] fp32
            table = rotary_table(frequencies, rows, self.attention_scaling)
            self._rotary_table = table
        return table


class CanonicalMLP(CanonicalModule):
    """Gated MLP with its activation through the canonical `glu`."""

    op = "glu"
    activation: str
    gate_proj: CanonicalLinear
    up_proj: CanonicalLinear
    down_proj: CanonicalLinear

    def forward(self, x: Tensor) -> Tensor:
        if not is_canonical("glu"):
            return super().forward(x)
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if _may_fuse(x, (gate, up)) and gate.bias is None and up.bias is None:
            return down(linear_glu(x, gate.weight, up.weight, self.activation))
        values = gate(x), up(x)
        # Hooks may have come meanwhile. Without a gradient of its own neither of both is kept.
        if any(value.requires_grad for value in values) and _keeps_less(down):
            return down.after_glu(*values, self.activation)
        return down(glu(*values, self.activation))


def _keeps_less(down: nn.Module) -> bool:
    """Whether `after_glu` may stand for a call of this projection, whatever watches it later."""
    # A compiler does not look at hooks again. Checkpointing counts saved tensors, and a hook may
    # come or go before it computes them again.
    if torch.compiler.is_compiling() or _top_saved_tensors_default_hooks(False) is not None:
        return False
    return isinstance(down, CanonicalLinear) and is_canonical("linear") and all_plain(down)


class LayerCall:
    """What all layers of a forward pass share, in no dataclass: FSDP2 would rebuild it, and cast
    the angles."""

    def __init__(
        self, position_embeddings: tuple[Tensor, Tensor], attention_layout: AttentionLayout
    ):
        self.position_embeddings, self.attention_layout = position_embeddings, attention_layout
        self.choice: Strictness = current()


class CanonicalAttention(CanonicalModule):
    """Projections, qk-norm, rotation and attention over packed rows or a paged cache."""

    op = "attention"
    head_dim: int
    scaling: float
    window: int | None
    apply_stock_rotary: Any
    q_proj: CanonicalLinear
    k_proj: CanonicalLinear
    v_proj: CanonicalLinear
    o_proj: nn.Module
    q_norm: CanonicalRMSNorm
    k_norm: CanonicalRMSNorm

    def forward(
        self,
        hidden_states: Tensor,
        *,
        call: LayerCall,
        cache_index: int,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """`cache_index`: the layer's place in the stack, where its cache is (`layer_idx` is the
        place it was made for). `rows` [n] int64 are those whose output is wanted; None: all."""
        layout = call.attention_layout
        q, k, v = self._inputs(hidden_states, *call.position_embeddings, layout, cache_index)
        out = self._attend(q, k, v, layout, cache_index)
        if rows is not None:
            out = out.index_select(0, rows)
        return self.o_proj(out.flatten(1).unsqueeze(0)), None

    def _inputs(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and rotated, and values, [R, heads, D]; a paged layout stores
        keys and values."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        norms = (self.q_norm, self.k_norm) if "q_norm" in self._modules else ()
        if _may_fuse(x, projections):
            operands: Any = zip(*((p.weight, p.bias) for p in projections), strict=True)
            projected = linear_qkv(x, *operands)
        else:
            projected = tuple(projection(x) for projection in projections)
        q, k, v = projected
        # Of whole projections, or of one head, which is the same. ZeRO-3 may have emptied weights.
        if norms and norms[0].rows_per_token == 1:
            q, k, norms = norms[0](q), norms[1](k), ()
        q, k, v = (y.view(x.shape[1], -1, self.head_dim) for y in (q, k, v))
        canonical = is_canonical("rotary")
        fuses = canonical and is_canonical("rms_norm") and not torch.is_grad_enabled()
        if isinstance(layout, PagedAttention) and fuses and all_plain(*norms):
            numbers: Any = (*(n.weight for n in norms), *(n.variance_epsilon for n in norms))
            of_heads = HeadNorms(*numbers) if norms else None
            return *paged_inputs(q, k, v, cos, sin, layout, index, norms=of_heads), v
        if norms:  # hooks see [1, R, heads, D], as those of other modules see packed rows
            q, k = (norm(y.unsqueeze(0)).squeeze(0) for norm, y in zip(norms, (q, k), strict=True))
        if canonical:
            q, k = rotary(q, k, cos, sin)
        else:
            q, k = self.apply_stock_rotary(q, k, cos[0], sin[0], unsqueeze_dim=1)
        if isinstance(layout, PagedAttention):
            write_cache(layout, index, k, v)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, index: int
    ) -> Tensor:
        canonical = is_canonical("attention")
        scores: dict[str, Any] = {"scale": self.scaling, "window": self.window}
        if layout.attend is not None:
            return layout.attend(q, k, v, index, self.scaling, self.window)
        if isinstance(layout, PagedAttention):
            if canonical:
                return attention_paged(q, layout, index, **scores, new=(k, v))[0]
            if compiles_only():
                return q.new_empty(q.shape)  # torch compiles nothing; the longest gather is large
            if isinstance(layout, CapturedPagedAttention):
                return stock_captured_attention(q, layout, index, **scores)
            k, v = (c[index].flatten(0, 1) for c in (layout.key_cache, layout.value_cache))
        elif canonical:
            assert isinstance(layout, PackedSequences)
            return attention_varlen(q, k, v, layout, **scores)[0]
        return stock_attention(q, k, v, layout, **scores)
