"""The patch session: a Hugging Face policy whose forward and backward run in canonical orders."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses, GradientBuffer
from rl_consistency.models import families
from rl_consistency.models.coverage import CoverageTable, coverage
from rl_consistency.models.decoder import CanonicalBaseModel
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.inventory import (
    Fault,
    ForwardState,
    ForwardWatch,
    copied_settings,
    faults,
)
from rl_consistency.models.layer_graphs import LayerGraphs
from rl_consistency.models.modules import (
    ADDED,
    CanonicalAttention,
    CanonicalModule,
    CanonicalRotaryEmbedding,
)
from rl_consistency.models.packing import PackedBatch, refuse_transforms
from rl_consistency.models.sharding import is_fsdp, unsharded_class, unwrapped, with_base
from rl_consistency.models.snapshot import Snapshot
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import (
    numeric_settings,
    read_settings,
    verify_defaults,
    verify_settings,
    write_settings,
)
from rl_consistency.numerics.strict import VARIABLE, current

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, PatchSession] = weakref.WeakKeyDictionary()

NOT_PATCHED = "the model is not patched; call rl_consistency.patch(model) first."


class _Taken(NamedTuple):
    """A module that was patched, by the object: it may move, or leave the model."""

    name: str
    module: weakref.ref[nn.Module]
    stock: type[nn.Module]
    canonical: type[nn.Module]


class PatchSession(AbstractContextManager["PatchSession"]):
    """A model's patch, live from `patch(model)` to `restore()` or the end of the `with` block.

    Parameters keep their places and names: optimizers, `state_dict`, `save_pretrained` and gradient
    checkpointing work as before. Autograd sums gradients as one fold over all backward passes since
    `zero_grad`.
    """

    def __init__(self, model: nn.Module, *, captures: bool = True):
        # _SESSIONS finds the session by the model; a strong reference would keep both forever.
        self._model = weakref.ref(model)
        self._grad_dtype: torch.dtype | None = None
        self._widened: dict[int, nn.Parameter] = {}
        self._followed: ForwardState | None = None  # the state that gradients' dtypes were set in
        self._passes, self._captures = BackwardPasses(), captures
        self._taken: list[_Taken] = []
        self._in_stock = False
        self._shared: list[tuple[str, str, nn.Module]] = []
        self._watch: ForwardWatch | None = None
        self._snapshot: Callable[[], Snapshot | None] = lambda: None  # of the last sound state
        # The last states that were found without a fault; a sharded model changes between some.
        self._sound: deque[ForwardState] = deque(maxlen=4)
        self._settings = ExitStack()
        self._settings_found = read_settings()
        # Releases the settings when the session is dropped without restore(), or at exit.
        weakref.finalize(self, self._settings.close)

    def __exit__(self, *exception: object) -> None:
        self.restore()

    @property
    def model(self) -> nn.Module:
        """The patched model."""
        model = self._model()
        if model is None:
            raise ValueError("the patched model no longer exists; keep a reference to it.")
        return model

    @property
    def live(self) -> bool:
        """Whether the model runs in the canonical orders now."""
        return bool(self._taken) and not self._in_stock and not self.faults()

    def restore(self) -> None:
        """Give the patched modules their stock classes back, also those that have left the model;
        parameters, gradients and what was put into the model since stay. Idempotent.

        ValueError, and nothing is changed, if another library made a class of a canonical one.
        """
        restored = self._swap_to_stock()
        self._passes.close()
        for _, module in restored:
            for attribute in ADDED:
                module.__dict__.pop(attribute, None)
        for parameter in self._widened.values():  # a gradient that is there is rounded
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype  # pyright: ignore[reportAttributeAccessIssue]
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._widened.clear()
        self._taken.clear()
        self._settings.close()
        if (model := self._model()) is not None:
            _SESSIONS.pop(model, None)

    @contextmanager
    def stock(self) -> Iterator[nn.Module]:
        """Inside the block, the unpatched Hugging Face model: same parameters, and the numeric
        settings from before the patch. Errors are those of `restore`."""
        nested, held = self._in_stock, read_settings()
        swapped = self._swap_to_stock()
        self._in_stock = True
        write_settings(self._settings_found)
        try:
            yield self.model
        finally:
            self._in_stock = nested
            if self._taken:  # else the block restored the session
                write_settings(held)
                for taken, module in swapped:
                    if not nested and unsharded_class(type(module)) is taken.stock:
                        module.__class__ = with_base(type(module), taken.canonical)

    def report(self) -> CoverageTable:
        """Every leaf module and functional op on the forward path, with its verdict."""
        return coverage(self.model, patched=bool(self._taken) and not self._in_stock)

    def faults(self) -> list[Fault]:
        """What was changed since the patch and cannot be honoured; see `models/inventory.py`. It
        looks closer only where the state of the forward is none of the last sound ones."""
        if (snapshot := self._snapshot()) is not None and snapshot.holds():
            return []
        self._snapshot = lambda: None
        if self._watch is None or (now := self._watch.read()) not in self._sound:
            found = faults(self.model, patched=True)
            if found:
                return found
            self._follow_sharding()
            self._watch = ForwardWatch(self.model)
            self._shared = _shared_modules(self.model)
            now = self._watch.read()
        if not self._sound or now != self._sound[-1]:
            self._sound.append(now)
        return []

    def check(self) -> ForwardState:
        """The state of the forward; UnsupportedModelError naming what was changed, ConsistencyError
        for a changed numeric setting, ValueError for another default dtype or device."""
        if self._in_stock:
            raise ValueError("the model is not patched inside session.stock(); leave the block.")
        if not self._taken:
            raise ValueError(NOT_PATCHED)
        refuse_transforms()
        verify_settings()
        verify_defaults()
        if found := self.faults():
            raise UnsupportedModelError(
                f"{found[0]}; it was patched and changed since ({len(found)} such places). Undo "
                "the change, or restore() the session and patch again."
            )
        return self._sound[-1]

    def snapshot(self) -> Snapshot:
        """What the forward reads now, for the caller to keep: as long as somebody does, and it
        holds, checks cost a fraction. Errors are those of `check`."""
        if (kept := self._snapshot()) is None:
            kept = Snapshot(self.model)
            self.check()
            if kept.holds():  # so it is of the state that was checked
                self._snapshot = weakref.ref(kept)
        return kept

    def check_forward(self) -> ForwardState:
        """`check`, and under gradients that no module with trained weights is at two places;
        ValueError for a model in training mode under `torch.inference_mode`."""
        state = self.check()
        without = torch.is_inference_mode_enabled() and self.model.training
        if without and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "torch.inference_mode is on, and the model is in training mode: no gradient would "
                "come of this pass. Leave the mode (did a reward function or a hook enter it?); to "
                "score, use torch.no_grad() or call model.eval()."
            )
        if torch.is_grad_enabled():
            if state is not self._followed:  # a cast takes the dtype of gradients along
                self._set_gradient_dtype(self._grad_dtype)
                self._followed = state
            for name, other, module in self._shared:
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    raise UnsupportedModelError(
                        f"{name} and {other} are one module, whose gradient would depend on how "
                        "the batch is cut. Copy it, freeze it, or run under torch.no_grad()."
                    )
        return state

    def verify(self) -> None:
        """Prove that the patch is live, or raise a ConsistencyError: by classes, by settings and by
        the bytes of three sequences' hidden states, computed alone and together."""
        undone = self.faults() if self._taken else ["the whole model runs its stock classes"]
        for what in undone[:1]:
            raise ConsistencyError(
                f"the patch is not live: {what}. Patch last, after whatever changes modules, and "
                "do not use a session after restore()."
            )
        verify_settings()
        if stock := ", ".join(sorted(current().stock)):
            raise ConsistencyError(
                f"ops on their stock path here: {stock}. Leave strict(...) or unset {VARIABLE}."
            )
        differ = self._differ_alone_and_together()
        if differ.any():
            raise ConsistencyError(
                f"{int(differ.sum())} of {len(differ)} probe tokens depend on their neighbours; "
                "see `rl-consistency verify` for the op."
            )

    @torch.no_grad()
    def _differ_alone_and_together(self) -> torch.Tensor:
        """Which of the probe's tokens have other bytes alone than together."""
        model: Any = self.model
        device, forward = next(model.parameters()).device, model.model.packed_forward
        vocabulary = model.get_input_embeddings().weight.shape[0]
        sequences = [[(i * 7 + n) % vocabulary for i in range(n)] for n in (1, 3, 21)]
        batch = PackedBatch.from_sequences(sequences, device)
        together = forward(batch.input_ids, batch.position_ids, batch.layout)[batch.token_rows]
        alone: list[torch.Tensor] = []
        for tokens in sequences:  # without filler rows, as a decode step has them
            ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
            layout = PackedSequences.of([0], [len(tokens)])
            alone.append(forward(ids.to(device), positions.to(device), layout))
        bits = [hidden.float().view(torch.int32) for hidden in (together, torch.cat(alone))]
        return (bits[0] != bits[1]).any(dim=1)

    def _swap_to_stock(self) -> list[tuple[_Taken, nn.Module]]:
        """Swap the modules that are left, which it returns; ValueError, and no swap, if one has a
        class of neither kind."""
        left = [(taken, module) for taken in self._taken if (module := taken.module()) is not None]
        for taken, module in left:
            if unsharded_class(type(module)) not in (taken.stock, taken.canonical):
                raise ValueError(
                    f"module {taken.name or 'root'} is a {type(module).__qualname__} now, made of "
                    "the patched class (parametrizations?); undo that first. Nothing was restored."
                )
        for taken, module in left:
            module.__class__ = with_base(type(module), taken.stock)
        return left

    def _follow_sharding(self) -> None:
        """Let gradients be those of the parameters that FSDP2 has put in the place of others."""
        if not any(map(is_fsdp, self.model.modules())):
            return
        for parameter in self.model.parameters():
            parameter.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
        for module, buffers in _gradient_buffers(self.model, self._passes).items():
            if isinstance(module, CanonicalModule) and not module.sharded:
                module.sharded, module._gradient_buffers = True, buffers
        self._widened.clear()  # they would keep whole parameters

    def _swap_to_canonical(self) -> None:
        config: Any = self.model.config
        mixins = families.mixins(config)
        buffers = _gradient_buffers(self.model, self._passes)
        for name, module in self.model.named_modules():
            stock: type[nn.Module] = type(module)
            if (mixin := mixins.get(stock)) is None:
                continue
            canonical = families.canonical_class(mixin, stock)
            self._taken.append(_Taken(name, weakref.ref(module), stock, canonical))
            module.__class__ = canonical
            assert isinstance(module, CanonicalModule)
            module._gradient_buffers = buffers[module]
            for key, value in copied_settings(config, module).items():
                setattr(module, key, value)
            if isinstance(module, CanonicalAttention):
                module.apply_stock_rotary = families.stock_rotary(config)
                if config.model_type in families.HEAD_NORMS:
                    module.q_norm.rows_per_token = config.num_attention_heads
                    module.k_norm.rows_per_token = config.num_key_value_heads
            elif isinstance(module, CanonicalRotaryEmbedding):
                module._rotary_table = None
            elif isinstance(module, CanonicalBaseModel):
                module.guard, module.passes = self.check_forward, self._passes
                module.layer_graphs = LayerGraphs() if self._captures else None

    def _set_gradient_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, torch.float32):
            raise ValueError(f"grad_dtype is {dtype}; it is torch.float32 or None.")
        for name, parameter in self.model.named_parameters() if dtype is not None else ():
            if parameter.grad is not None and parameter.grad.dtype != dtype:
                raise ValueError(
                    f"{name} has a gradient in {parameter.grad.dtype}, and grad_dtype is {dtype}. "
                    "Call optimizer.zero_grad(set_to_none=True) first."
                )
            if parameter.grad_dtype == dtype:  # pyright: ignore[reportAttributeAccessIssue]
                continue
            self._widened[id(parameter)] = parameter
            parameter.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]


def patch(
    model: nn.Module, *, grad_dtype: torch.dtype | None = None, cuda_graphs: bool = True
) -> PatchSession:
    """Swap a Hugging Face causal LM onto the canonical orders, in place; `restore()` undoes it.

    Args:
        model: a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, OLMoE or Mixtral `...ForCausalLM`, fp32,
            bf16 or fp16, before `accelerator.prepare`.
        grad_dtype: dtype of `parameter.grad`. None is torch's default, the parameter's own dtype,
            which torch's optimizers need. fp32 keeps all digits of the fold for an optimizer with
            fp32 master weights.
        cuda_graphs: capture the layers' training passes where the host would take longer than the
            GPU. It moves no bit. Activations and gradients then keep their memory between steps.

    Raises:
        UnsupportedModelError: names the architecture, module, dtype or setting not covered.
        ValueError: already patched, or a gradient of another dtype is present.
    """
    if model in _SESSIONS:
        raise ValueError("the model is patched already; restore() the session before that.")
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Hugging Face model; patch the ...ForCausalLM itself."
        )
    families.check_head(model)
    if found := faults(model):
        raise UnsupportedModelError(
            f"{found[0]} ({len(found)} such places). Undo it (merge adapters, do not quantize), or "
            f"use one of {', '.join(families.FAMILIES.values())} as its config makes it."
        )
    session = PatchSession(model, captures=cuda_graphs)
    try:
        session._settings.enter_context(numeric_settings())
        session._swap_to_canonical()
        session._grad_dtype = grad_dtype
        session._set_gradient_dtype(grad_dtype)
    except BaseException:
        session.restore()
        raise
    _SESSIONS[model] = session
    return session


def patched_session(model: nn.Module) -> PatchSession:
    """The live session of a model, or of that in wrappers; errors: see `PatchSession.check`."""
    return forward_path(model)[0]


def forward_path(model: nn.Module) -> tuple[PatchSession, ForwardState]:
    """What a patched model's forward pass runs, without the values of its weights; errors are those
    of `PatchSession.check`."""
    session = _SESSIONS.get(unwrapped(model))
    if session is None:
        raise ValueError(NOT_PATCHED)
    return session, session.check()


def patched_part(model: nn.Module, name: str) -> Any:
    """A direct submodule of a patched model; ValueError if it runs stock. `patched_session` checks
    every module."""
    part = getattr(model, name, None)
    if model not in _SESSIONS or not isinstance(part, CanonicalModule):
        raise ValueError(NOT_PATCHED)
    return part


def _shared_modules(model: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """Canonical modules at two places: both names, and the module."""
    seen: dict[nn.Module, str] = {}
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, CanonicalModule) and seen.setdefault(module, name) != name:
            found.append((seen[module], name, module))
    return found


def _gradient_buffers(
    model: nn.Module, passes: BackwardPasses
) -> dict[nn.Module, dict[str, GradientBuffer]]:
    """One buffer per use of each parameter, by module and name; a tied parameter has several."""
    found = {module: dict[str, GradientBuffer]() for module in model.modules()}
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in found:
        for name, parameter in module.named_parameters(recurse=False):
            uses.setdefault(parameter, []).append((module, name))
    for parameter, places in uses.items():
        buffers = GradientBuffer.for_uses(parameter, len(places), passes)
        for (module, name), buffer in zip(places, buffers, strict=True):
            found[module][name] = buffer
    return found
