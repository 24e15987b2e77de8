"""The patch session: a Hugging Face policy whose forward and backward run in canonical orders."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.models import families
from rl_consistency.models.audit import AuditTable, audit
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.modules import CanonicalAttention, CanonicalMLP, CanonicalModule
from rl_consistency.models.packing import PackedBatch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import SETTINGS, numeric_settings, verify_settings
from rl_consistency.numerics.strict import VARIABLE, current

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, PatchSession] = weakref.WeakKeyDictionary()

NOT_PATCHED = "the model is not patched; call rl_consistency.patch(model) first."

_ATTRIBUTES = "_gradient_buffers rows_per_token activation window apply_stock_rotary _rotary_table"


@dataclass(frozen=True, slots=True)
class _Place:
    """An attribute through which a forward pass reaches a canonical module, or a parent of one."""

    name: str
    parent: weakref.ref[nn.Module]
    attribute: str
    module: weakref.ref[nn.Module]
    canonical: bool

    @staticmethod
    def all_in(model: nn.Module) -> list[_Place]:
        """One place per parent and attribute: a shared module has several."""
        places: list[_Place] = []
        for name, parent in model.named_modules():
            for own, module in parent._modules.items():
                if module is None or not any(map(_is_ours, module.modules())):
                    continue
                path, refs = f"{name}.{own}".lstrip("."), (weakref.ref(parent), weakref.ref(module))
                places.append(_Place(path, refs[0], own, refs[1], _is_ours(module)))
        return places

    def held(self) -> bool:
        """Whether the attribute still gives this module, canonical if it was."""
        # Looked up as forward does: an attribute of the instance or its class hides a submodule.
        found = getattr(self.parent(), self.attribute, None)
        if found is None or found is not self.module():
            return False
        return not self.canonical or _is_canonical(found)


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, CanonicalModule)


def _is_canonical(module: nn.Module) -> bool:
    return _is_ours(module) and "forward" not in module.__dict__


class PatchSession:
    """A model's patch, live from `patch(model)` to `restore()` or the end of the `with` block.

    Parameters keep their places and names: optimizers, `state_dict`, `save_pretrained` and gradient
    checkpointing work as before, and gradients are ordinary ones to autograd, which sums them as
    one fold over all backward passes since `zero_grad`.
    """

    def __init__(self, model: nn.Module):
        # _SESSIONS finds the session through the model; a strong reference would keep both forever.
        self._model = weakref.ref(model)
        self._stock_classes: dict[str, type[nn.Module]] = {}
        self._places: list[_Place] = []
        self._widened: list[nn.Parameter] = []
        self._settings = ExitStack()
        self._settings_found = _read_settings()
        # Releases the settings when the session is dropped without restore(), or at exit.
        weakref.finalize(self, self._settings.close)

    def __enter__(self) -> PatchSession:
        return self

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
        return bool(self._stock_classes) and not self._undone()

    def restore(self) -> None:
        """Give the model its stock classes back; parameters and gradients stay. Idempotent."""
        self._swap_to_stock()
        for name in self._stock_classes:
            for attribute in _ATTRIBUTES.split():
                self.model.get_submodule(name).__dict__.pop(attribute, None)
        for parameter in self._widened:
            _restore_gradient_dtype(parameter)
        self._widened.clear()
        self._stock_classes.clear()
        self._places.clear()
        self._settings.close()
        _SESSIONS.pop(self.model, None)

    @contextmanager
    def stock(self) -> Iterator[nn.Module]:
        """Inside the block, the unpatched Hugging Face model: same parameters, and the numeric
        settings from before the patch."""
        patched = {name: type(self.model.get_submodule(name)) for name in self._stock_classes}
        held = _read_settings()
        self._swap_to_stock()
        _write_settings(self._settings_found)
        try:
            yield self.model
        finally:
            if self._stock_classes:  # else the block restored the session
                _write_settings(held)
            for name in self._stock_classes:
                self.model.get_submodule(name).__class__ = patched[name]

    def report(self) -> AuditTable:
        """Every leaf module and functional op on the forward path, with its verdict."""
        return audit(self.model, self._stock_classes)

    def verify(self) -> None:
        """Prove that the patch is live, or raise a ConsistencyError: by classes, by settings and by
        the bytes of three sequences' hidden states, computed alone and together."""
        undone = self._undone()
        if undone or not self._stock_classes:
            where = f"module {undone[0] or 'root'}" if undone else "the whole model"
            raise ConsistencyError(
                f"the patch is not live: {where} runs its stock class. Patch last, after whatever "
                "replaces modules, and do not use a session after restore()."
            )
        verify_settings()
        if stock := ", ".join(sorted(current().stock)):
            raise ConsistencyError(
                f"ops on their stock path here: {stock}. Leave strict(...) or unset {VARIABLE}."
            )
        different, tokens = self._compare_alone_and_together()
        if different:
            raise ConsistencyError(
                f"{different} of {tokens} probe tokens depend on their neighbours; see "
                "`rl-consistency verify` for the op."
            )

    @torch.no_grad()
    def _compare_alone_and_together(self) -> tuple[int, int]:
        """How many of the probe's tokens differ between alone and together, and how many it has."""
        model: Any = self.model
        device = next(model.parameters()).device
        vocabulary = model.get_input_embeddings().weight.shape[0]
        sequences = [[(i * 7 + n) % vocabulary for i in range(n)] for n in (1, 3, 21)]
        batch = PackedBatch.from_sequences(sequences, device)
        forward = model.model.packed_forward
        together = forward(batch.input_ids, batch.position_ids, batch.layout)[batch.token_rows]
        alone: list[torch.Tensor] = []
        for tokens in sequences:  # without filler rows, as a decode step has them
            ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
            layout = PackedSequences.of([0], [len(tokens)])
            alone.append(forward(ids.to(device), positions.to(device), layout))
        bits = [hidden.float().view(torch.int32) for hidden in (together, torch.cat(alone))]
        return int((bits[0] != bits[1]).any(dim=1).sum()), len(together)

    def _undone(self) -> list[str]:
        """Names of the modules that no longer run as they were patched; the root's is empty."""
        undone = [place.name for place in self._places if not place.held()]
        root_undone = "" in self._stock_classes and not _is_canonical(self.model)
        return ["", *undone] if root_undone else undone

    def _swap_to_stock(self) -> None:
        for name, cls in self._stock_classes.items():
            self.model.get_submodule(name).__class__ = cls

    def _swap_to_canonical(self) -> None:
        config: Any = self.model.config
        table = families.mixins(config)
        buffers = _gradient_buffers(self.model)
        for name, module in self.model.named_modules():
            mixin = table.get(type(module))
            if mixin is None:
                continue
            stock = type(module)
            module.__class__ = families.canonical_class(mixin, stock)
            assert isinstance(module, CanonicalModule)
            module._gradient_buffers = {
                own: buffers[f"{name}.{own}".lstrip(".")]
                for own, _ in module.named_parameters(recurse=False)
            }
            self._stock_classes[name] = stock
            self._configure(config, module)
        self._places = _Place.all_in(self.model)

    def _set_gradient_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, torch.float32):
            raise ValueError(f"grad_dtype is {dtype}; it is torch.float32 or None.")
        for name, parameter in self.model.named_parameters():
            if dtype is None or parameter.grad_dtype == dtype:  # pyright: ignore[reportAttributeAccessIssue]
                continue
            if parameter.grad is not None and parameter.grad.dtype != dtype:
                raise ValueError(
                    f"{name} has a gradient in {parameter.grad.dtype}, and grad_dtype is {dtype}. "
                    "Call optimizer.zero_grad(set_to_none=True) before patch()."
                )
            self._widened.append(parameter)
            parameter.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]

    def _configure(self, config: Any, module: nn.Module) -> None:
        if isinstance(module, CanonicalMLP):
            module.activation = families.ACTIVATIONS[config.hidden_act]
        elif isinstance(module, CanonicalAttention):
            module.window = families.window_of(config, module)
            module.apply_stock_rotary = families.modeling(config).apply_rotary_pos_emb
            if hasattr(module, "q_norm"):
                module.q_norm.rows_per_token = config.num_attention_heads
                module.k_norm.rows_per_token = config.num_key_value_heads


def patch(model: nn.Module, *, grad_dtype: torch.dtype | None = None) -> PatchSession:
    """Swap a Hugging Face causal LM onto the canonical orders, in place; `restore()` undoes it.

    Args:
        model: a dense Llama, Mistral, Qwen2 or Qwen3 `...ForCausalLM`, fp32, bf16 or fp16, before
            `accelerator.prepare`.
        grad_dtype: dtype of `parameter.grad`. None is torch's default, the parameter's own dtype,
            which torch's optimizers need. fp32 keeps all digits of the fold for an optimizer with
            fp32 master weights.

    Raises:
        UnsupportedModelError: names the architecture, module, dtype or setting not covered.
        ValueError: already patched, or a gradient of another dtype is present.
    """
    if model in _SESSIONS:
        raise ValueError("the model is patched already; restore() the session before that.")
    if _is_ours(model):
        raise ValueError(
            "the model is a copy of a patched one; copy a model before patching, or restore() it."
        )
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Hugging Face model; patch the ...ForCausalLM itself."
        )
    families.check_config(config)
    families.check_head(model)
    families.check_parameters(model)
    audit(model, {}).require_supported()
    session = PatchSession(model)
    try:
        session._settings.enter_context(numeric_settings())
        session._swap_to_canonical()
        session._set_gradient_dtype(grad_dtype)
    except BaseException:
        session.restore()
        raise
    _SESSIONS[model] = session
    return session


def patched_session(model: nn.Module) -> PatchSession:
    """The live session of a model; ValueError if it is not patched, or is running stock."""
    session = _SESSIONS.get(model)
    if session is None or not session.live:
        raise ValueError(NOT_PATCHED)
    return session


def patched_part(model: nn.Module, name: str) -> nn.Module:
    """A direct submodule of a patched model; ValueError if it runs stock.

    `patched_session` checks every module; a call that has used it needs only this check after.
    """
    if model not in _SESSIONS or not _is_canonical(getattr(model, name)):
        raise ValueError(NOT_PATCHED)
    return getattr(model, name)


def _read_settings() -> tuple[Any, ...]:
    return tuple(setting.read() for setting in SETTINGS)


def _write_settings(values: tuple[Any, ...]) -> None:
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.write(value)


def _gradient_buffers(model: nn.Module) -> dict[str, GradientBuffer]:
    """One buffer per use of each parameter, by qualified name; a tied parameter has several."""
    uses: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            uses.setdefault(parameter, []).append(own)
    return {
        name: buffer
        for parameter, names in uses.items()
        for name, buffer in zip(names, GradientBuffer.for_uses(parameter, len(names)), strict=True)
    }


def _restore_gradient_dtype(parameter: nn.Parameter) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = parameter.dtype  # pyright: ignore[reportAttributeAccessIssue]
    parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
