"""What a stock forward reads of a model, and whether the patched forward honours it.

A covered model is what its config makes: the same classes and their code, submodules, plain
attributes and rotary frequencies. The values of the parameters are its own, and hooks may stand
where the patched forward calls the module. Anything else is a fault, and is refused by name.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from types import FunctionType, GetSetDescriptorType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.container import ModuleList
from torch.nn.modules.sparse import Embedding
from transformers import PreTrainedConfig, PreTrainedModel

from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.models import families, installed_code
from rl_consistency.models.families import normalizes
from rl_consistency.models.installed_code import written_in
from rl_consistency.models.modules import (
    ADDED,
    CanonicalAttention,
    CanonicalMLP,
    CanonicalModule,
    CanonicalRotaryEmbedding,
    asks_for_gradients,
    captures_outputs,
    is_checkpointed_otherwise,
)
from rl_consistency.models.moe import CanonicalExperts, CanonicalRouter
from rl_consistency.models.sharding import is_sharded, of_a_library

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)

ACTIVATIONS = (".mlp.act_fn", ".mlp.experts.act_fn")
UNCALLED = ("", "model", "model.rotary_emb", "lm_head")
"""Modules that the patched forward does not call as stock does; so are all activations."""

_UNREAD = {
    *("training", "gradient_checkpointing", "layer_idx", "padding_idx", "vocab_size", "config"),
    *("max_seq_len_cached", "original_max_seq_len", "name_or_path", "kernel_config"),
    *("loss_type", "all_tied_weights_keys", "generation_config", "warnings_issued"),
    "router_aux_loss_coef",  # read with router logits alone, which are refused
}
"""Attributes that no covered forward reads, or that the patched forward honours."""

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
_CALLS = frozenset(("forward", "packed_forward", "_call_impl", "_wrapped_call_impl"))
_CHECKPOINTING = frozenset(("gradient_checkpointing", "_gradient_checkpointing_func"))
_ZERO_3_COUNTERS = frozenset(("applied_pre_backward_ref_cnt", "ds_grads_remaining"))

STATELESS = {"training", *_ZERO_3_COUNTERS}
"""Attributes that no forward without checkpoints depends on."""

UNWATCHED = {*STATELESS, "_rotary_table", *_CHECKPOINTING}
"""Attributes that come and go while a patched model works."""


class Fault(NamedTuple):
    """A place that is not as the config makes it, or that the patched forward would pass over."""

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"module {self.name or 'root'} ({self.kind}) {self.reason}"


def faults(model: nn.Module, *, patched: bool = False) -> list[Fault]:
    """Every fault of a model of a covered class; `patched`: its modules have to be canonical."""
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    if not isinstance(config, PreTrainedConfig):
        return [Fault("", kind, f"has a {type(config).__name__} in the place of its config")]
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return [Fault("", kind, "has a hook on all modules, some of which would not run it")]
    if found := [*_computed_settings(config)]:
        return [Fault("", kind, reason) for reason in found]
    if found := list(_hidden_parts(model)):
        return found
    try:
        try:
            families.check_model(model, sharded=patched and is_sharded(model))
            made = _as_configured(config, families.stock_class(type(model)))
        except families.UnsupportedModelError:
            raise
        except _NO_MODEL as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return [Fault("", kind, f"has a config that no model can be made of ({said})")]
        return list(_Comparison(config, patched).walk("", model, made))
    except families.UnsupportedModelError as error:
        return [Fault("", kind, f"is not covered: {str(error).rstrip('.')}")]


_NO_MODEL = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What transformers raises of a config whose values fit nothing."""


def _computed_settings(config: PreTrainedConfig) -> Iterator[str]:
    """Settings that other code computes where they are read, and values that are no plain ones:
    what a forward gets may change with each call."""
    for cls in type(config).__mro__[:-1]:
        for name, member in vars(cls).items():
            if isinstance(member, _METHODS) and name not in ("__getattr__", "__getattribute__"):
                continue
            get = member.fget if isinstance(member, property) else member
            if hasattr(type(member), "__get__") and not _is_member(get, cls, name):
                yield f"has a config whose {name} is computed, by other code than transformers' own"
    own = vars(config)
    for name in sorted(type(config).__dataclass_fields__.keys() & own.keys()):
        if (kind := type(own[name])) not in _PLAIN:
            yield f"has a {kind.__module__}.{kind.__qualname__} as config.{name}; give plain ones"


_METHODS = (FunctionType, classmethod, staticmethod, GetSetDescriptorType)
_PLAIN = (NoneType, bool, int, float, str, list, tuple, dict, torch.dtype)


def _is_member(function: Any, cls: type, name: str) -> bool:
    """Whether a function is the one of this name that the installed file of a class has there."""
    right = f"{cls.__qualname__}.{name}"
    return written_in(function) == cls.__module__ and function.__code__.co_qualname == right


def _as_configured(config: PreTrainedConfig, cls: Any) -> nn.Module:
    """The model that the config makes, without memory; its rotary frequencies are real."""
    config = copy.deepcopy(config)
    config.pad_token_id, config._attn_implementation = None, "eager"
    with torch.device("meta"):
        made = cls(config)
    with torch.device("cpu"):
        made.model.rotary_emb = type(made.model.rotary_emb)(config)
    return made


class _Comparison:
    """Walks a model beside the one that its config makes."""

    def __init__(self, config: Any, patched: bool) -> None:
        self._config, self._patched = config, patched
        self._mixins, self._places = families.mixins(config), families.stands_on(config)

    def walk(self, name: str, module: nn.Module, made: nn.Module) -> Iterator[Fault]:
        """Faults of a module and of all below it."""
        stock = families.stock_class(type(module))
        fault = partial(Fault, name, stock.__name__)
        if stock is not (right := type(made)):
            another = stock.__name__ == right.__name__  # another library's
            kind = f"{stock.__module__}.{stock.__name__}" if another else stock.__name__
            reason = f"has no canonical order: the config makes a {right.__name__} here"
            yield Fault(name, kind, reason)
            return
        for key in ("_parameters", "_buffers", "_modules", *HOOKS):
            if not _is_plain_dict(held := vars(module)[key]):
                kind = f"{type(held).__module__}.{type(held).__qualname__}"
                yield fault(f"has a {kind} as its {key}, and no dict")
                return
        if self._patched and stock in self._mixins and not isinstance(module, CanonicalModule):
            yield fault("runs its stock class")
            return
        yield from map(fault, self._own_faults(name, module, made))
        present, count = module._modules, len(made._modules)
        if right is ModuleList and [*present] != [*made._modules]:
            if len(present) == count:
                yield fault(f"has its layers in the order {', '.join(present)}")
            else:
                yield fault(f"has {len(present)} layers, and config.num_hidden_layers is {count}")
            return
        for key, child in made.named_children():
            path, found = f"{name}.{key}".lstrip("."), present.get(key)
            if found is None:
                yield Fault(path, type(child).__name__, "is missing")
            elif key in vars(module):
                yield Fault(path, type(child).__name__, "is hidden by an attribute")
            else:
                yield from self.walk(path, found, child)
        reason = "has no canonical order: the config makes no module here"
        for key in sorted(present.keys() - made._modules.keys()):
            if (extra := present[key]) is not None:
                yield Fault(f"{name}.{key}".lstrip("."), type(extra).__name__, reason)

    def _own_faults(self, name: str, module: nn.Module, made: nn.Module) -> Iterator[str]:
        own, expected = vars(module), vars(made)
        if name.endswith(ACTIVATIONS) and not _computes(module, self._config.hidden_act):
            yield f"computes another function than {self._config.hidden_act}"
        if not families.is_listed(type(made), self._places):
            yield f"has a class whose code is not known, {installed_code.described(type(made))}"
        for key in sorted(own.keys() - expected.keys() - ADDED):
            if key in _CALLS:
                yield (
                    f"had its {key} replaced on the instance by {_origin(own[key])}; where a "
                    "trainer does so, leave the model to rl_consistency.attach(trainer)"
                )
            elif key in made._parameters or key in made._buffers or _is_read(key, type(made)):
                yield f"has its own {key}, which hides the one it was made with"
        for key in sorted(expected.keys() - _UNREAD):
            value, right = _plain(own.get(key)), _plain(expected[key])
            if not key.startswith("_") and value != right:
                yield f"has {key}={value!r}, and the config makes it {right!r}"
        if isinstance(made, Embedding) and not _is_row(index := own.get("padding_idx"), made):
            yield f"has padding_idx={index!r}, which is neither None nor the number of a row"
        for kind in ("_parameters", "_buffers"):
            if (found := _shapes(own[kind])) != (right := _shapes(expected[kind])):
                yield f"has {kind[1:]} {found}, and the config makes {right}"
        if "config" in expected:
            yield from self._config_faults(name, own.get("config"))
        on_cpu = any(parameter.device.type == "cpu" for parameter in module.parameters())
        if own.get("_compiled_call_impl") is not None and on_cpu:
            yield "is compiled, and compiled code has other bytes on a CPU"
        uncalled = name in UNCALLED or name.endswith(ACTIVATIONS)
        hooks = [hook for kind in HOOKS for hook in own[kind].values()]
        if not all(of_a_library(hook) or captures_outputs(hook) for hook in hooks):
            if uncalled:
                yield "has a hook, which the patched forward would not run"
            if name.endswith((".mlp.gate", ".mlp.experts")):
                yield "has a hook, which would see other tensors than stock's: ids in their order"
        if name == "model.rotary_emb":
            for key, frequencies in made.named_buffers():
                if not _is_rounding_of(own["_buffers"].get(key), frequencies):
                    yield f"has another {key} than the config makes"
        for key, right in copied_settings(self._config, module).items():
            if (value := getattr(module, key)) != right:
                yield f"was patched with {key}={value!r}, and the config has {right!r}"

    def _config_faults(self, name: str, config: Any) -> Iterator[str]:
        if name in UNCALLED and config is not self._config:
            yield "has a config that is not the model's"
        elif type(config) is not type(self._config):
            yield f"has a {type(config).__name__} in the place of its config"
        elif config is not self._config:  # of a layer that was copied
            # What a part takes from its own config at every call.
            families.check_implementations(config)
            for key in ("sliding_window", "clip_qkv"):
                value = getattr(config, key, None)
                if value != getattr(self._config, key, None):
                    yield f"has {key}={value} in a config of its own"


def _hidden_parts(model: nn.Module) -> Iterator[Fault]:
    """What a module has under a name that Python looks up in its class first."""
    for path, module in model.named_modules():
        own = vars(module)
        parts = {name for kind in ("_parameters", "_buffers", "_modules") for name in own[kind]}
        for cls in type(module).__mro__:
            members = vars(cls)
            for name in members.keys() & (own.keys() | parts):
                if name in parts or hasattr(type(members[name]), "__set__"):
                    reason = f"has a class whose own {name} hides that of the module"
                    yield Fault(path, families.stock_class(type(module)).__name__, reason)


def _is_row(index: Any, embedding: Embedding) -> bool:
    """Whether torch takes this for the row that gets no gradient, or for no row."""
    size = embedding.num_embeddings
    return index is None or (type(index) is int and -size <= index < size)


def _is_plain_dict(held: Any) -> bool:
    """Whether what is looked up here is what is stored; ZeRO-3 gathers parameters in its own."""
    of_zero_3 = written_in(vars(type(held)).get("__getitem__")).startswith("deepspeed.runtime.")
    return type(held) in (dict, OrderedDict) or of_zero_3


def _computes(activation: Any, name: str) -> bool:
    """Whether an activation is the one that transformers calls so; its table may be changed."""
    x, right = torch.linspace(-6.0, 6.0, 25, device="cpu"), _ACTIVATIONS[families.ACTIVATIONS[name]]
    with torch.no_grad():
        return torch.allclose(activation.forward(x), right(x), rtol=1e-5, atol=1e-6)


def _is_read(key: str, cls: type[nn.Module]) -> bool:
    """Whether a forward may look for this attribute on the class, and find an instance's first."""
    if issubclass(cls, PreTrainedModel) or key in _CHECKPOINTING:
        return False
    return hasattr(cls, key) and not hasattr(nn.Module, key)


def _origin(call: Any) -> str:
    """Module and name of the code behind a callable, whatever `functools.wraps` says of it."""
    while isinstance(call, partial | MethodType):
        call = call.func if isinstance(call, partial) else call.__func__
    code = getattr(call, "__code__", None)
    if code is None:
        return f"a {type(call).__module__}.{type(call).__qualname__}"
    return f"{call.__globals__.get('__name__')}.{code.co_qualname}"


def _plain(value: Any) -> Any:
    """A value to compare; an object that has no plain value stands for its type."""
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    is_plain = type(value) in (NoneType, bool, int, float, str, tuple)
    return value if is_plain or callable(value) else type(value)


def _shapes(tensors: dict[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
    """Shapes of whole tensors; ZeRO-3 keeps the shape of an emptied parameter beside it."""
    return {n: tuple(getattr(t, "ds_shape", t.shape)) for n, t in tensors.items() if t is not None}


def _is_rounding_of(buffer: Tensor | None, frequencies: Tensor) -> bool:
    """Whether a buffer holds the frequencies, perhaps cast as `model.to(dtype)` does; devices
    differ in the last bits."""
    if buffer is None or buffer.shape != frequencies.shape:
        return False
    found = buffer.detach().float().cpu()
    rounded = [frequencies.to(dtype).float() for dtype in DTYPES]
    return any(torch.allclose(found, right, rtol=1e-6, atol=0.0) for right in rounded)


class ForwardState(NamedTuple):
    """What a forward pass reads beside the values of the parameters; two are equal where nothing
    was changed between them."""

    hooked: bool
    """Whether any module has a hook that may change something, or a checkpointing of its own: what
    these read in turn cannot be seen."""
    config: str
    values: tuple[object, ...]
    """Classes, attributes, hooks and identities of all modules, and the functions they call."""


class ForwardWatch:
    """Reads the state of a model's forward in some microseconds a module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        modules = list(model.modules())
        config: Any = getattr(model, "config", None)
        self._parts = [(weakref.ref(module), _getter(module)) for module in modules]
        classes = {type(config), *(families.stock_class(type(module)) for module in modules)}
        self._classes = tuple({base for cls in classes for base in cls.__mro__[:-1]})
        self._code = families.code_watch(config) if config is not None else None

    def read(self) -> ForwardState:
        """The state now; a module that is gone or lacks an attribute is in it as None."""
        config: Any = getattr(self._model(), "config", None)
        hooked = False
        values: list[object] = []  # flat: thousands of small tuples would keep the collector busy
        for ref, get in self._parts:
            module: Any = ref()
            try:
                own = module.__dict__
                parameters, children, buffers, *rest = found = get(own)
            except (AttributeError, KeyError):
                values.append(None)
                continue
            values += (type(module), len(own))
            values += map(type, found)
            if (own_config := own.get("config")) is not config:  # of a layer that was copied
                values.append(own_config and repr(vars(own_config)))
            kinds = rest[: len(HOOKS)]
            if any(kinds):
                for hooks in kinds:
                    seen = [key for key, hook in hooks.items() if not _changes_nothing(hook)]
                    hooked = hooked or bool(seen)
                    values += seen and (*seen, None)
            hooked = hooked or is_checkpointed_otherwise(module)
            values += rest[len(HOOKS) :]
            for parameter in parameters.values():
                if parameter is None:
                    values.append(None)
                    continue
                values += (id(parameter), type(parameter), parameter.dtype, parameter.is_neg())
            values += children
            values += map(id, children.values())
            for buffer in buffers.values():
                values += (id(buffer), _version(buffer))
        for name in _GLOBAL_HOOKS:
            values += getattr(torch_module, name)
        for cls in self._classes:
            values += vars(cls).values()
        settings = ""
        if isinstance(config, PreTrainedConfig) and self._code is not None:
            values += self._code.read(config)
            values += (type(config), *map(type, vars(config).values()))
            settings = f"{vars(config)} {type(config).attribute_map}"
        return ForwardState(hooked, settings, tuple(values))


def _changes_nothing(hook: Any) -> bool:
    return asks_for_gradients(hook) or captures_outputs(hook)


def _version(buffer: Tensor | None) -> int:
    """What changes when a buffer is written to."""
    return buffer._version if buffer is not None and not buffer.is_inference() else 0


def _getter(module: nn.Module) -> itemgetter[Any]:
    """Takes the containers and the plain attributes of a module out of its dictionary."""
    plain = [
        key
        for key, value in vars(module).items()
        if key not in UNWATCHED and (value is None or isinstance(value, (bool, int, float, str)))
    ]
    return itemgetter("_parameters", "_modules", "_buffers", *HOOKS, *plain)


def copied_settings(config: Any, module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that hold what the config says."""
    if isinstance(module, CanonicalMLP | CanonicalExperts):
        return {"activation": families.ACTIVATIONS[config.hidden_act]}
    if isinstance(module, CanonicalRouter):
        return {"normalizes": normalizes(config)}
    if isinstance(module, CanonicalAttention):
        return {"window": families.window_of(config, module)}
    if isinstance(module, CanonicalRotaryEmbedding):
        return {"rope_settings": repr(config.rope_parameters)}
    return {}
