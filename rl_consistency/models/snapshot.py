"""What a forward pass reads of a model, as it is at one time, to compare with what it is later.

`Snapshot.holds` asks whether all of it is the very same: then a check need not look again.
`looks` gives what names a difference, and takes some ten microseconds a part, so that each step of
a rollout can ask some of them.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from rl_consistency.models import families
from rl_consistency.models.inventory import HOOKS, STATELESS, UNWATCHED

MODULES_PER_PART = 32
CODE_EVERY = 64  # looks between two at the code

_KINDS = {"_parameters": "parameter", "_modules": "submodule", "_buffers": "buffer"} | {
    kind: "hook" for kind in HOOKS
}
_CALLED = {
    *("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"),
    *("__getattribute__", "__getitem__", "__iter__", "__len__"),
}
"""What a forward reads of the bases of all models. Libraries exchange other names there."""
_GLOBAL_HOOKS = [f"_global{kind}" for kind in HOOKS]
_ABSENT = object()
_VALUES = operator.methodcaller("values")
_DTYPE, _VERSION = operator.attrgetter("dtype"), operator.attrgetter("_version")


class Change(NamedTuple):
    """Something that is not as it was when the rollout began."""

    what: str
    of_weights: bool


class Snapshot:
    """A patched model as it is now. It keeps no memory of weights that are given other memory, and
    keeps parameters alive that leave the model."""

    def __init__(self, model: Any) -> None:
        named = list(model.named_modules())
        starts = range(0, len(named), MODULES_PER_PART)
        self._modules = [_Modules(named[start : start + MODULES_PER_PART]) for start in starts]
        self._shared, self._code = _Shared(model), _Code(model.config)

    def holds(self) -> bool:
        """Whether the forward reads the very same now: all but the values of weights."""
        return all(part.holds() for part in (self._shared, self._code, *self._modules))

    def looks(self) -> list[Callable[[], Change | None]]:
        """For one rollout: each names the first difference it finds in some of the model; a weight
        that is written to, or moved, from now on is one."""
        looks: list[Callable[[], Change | None]] = [self._shared.changed]
        looks.append(partial(self._code.changed, itertools.count(1)))
        return looks + [partial(part.changed, part.read_places()) for part in self._modules]

    def addresses(self) -> list[object]:
        """Where all parameters and buffers lie, their strides and shapes."""
        return [place for part in self._modules for place in part.read_memory()]


class _Modules:
    """Some modules, their dictionaries and the places of their tensors."""

    def __init__(self, named: list[tuple[str, nn.Module]]) -> None:
        self._names = [name or "root" for name, _ in named]
        self._modules = [module for _, module in named]
        self._types = list(map(type, self._modules))
        # Flat lists, whose elements C code compares.
        self._labels: list[tuple[str, str]] = []
        self._dicts: list[Mapping[str, Any]] = []
        self._empty: list[Mapping[str, Any]] = []
        self._empty_labels: list[tuple[str, str]] = []
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        names: dict[str, list[str]] = {"_parameters": [], "_buffers": [], "": []}
        tables: list[Tensor] = []  # of angles
        self._owns = list(map(vars, self._modules))
        for name, own in zip(self._names, self._owns, strict=True):
            for kind in ("", *_KINDS):
                found = own[kind] if kind else own
                (self._labels if found else self._empty_labels).append((name, kind))
                (self._dicts if found else self._empty).append(found)
            table = {key: own[key] for key in ("_rotary_table",) if key in own}
            memory = {"_parameters": self._parameters, "_buffers": self._buffers, "": tables}
            for kind, into in memory.items():
                for key, tensor in (own[kind] if kind else table).items():
                    if tensor is not None:
                        names[kind].append(f"{name}.{key}")
                        into.append(tensor)
        self._memory = [*self._parameters, *self._buffers]
        named_tensors = zip(chain(*names.values()), [*self._memory, *tables], strict=True)
        tensors = [(name, x) for name, x in named_tensors if not x.is_inference()]
        self._tensor_names, self._tensors = [n for n, _ in tensors], [x for _, x in tensors]
        self._kept = list(map(dict, self._dicts))
        self._keys, self._values = self._read_entries()
        # Dictionaries are equal in any order, and a list of layers runs in its own.
        self._lists = [vars(m) for m in self._modules if isinstance(m, nn.ModuleList)]
        self._orders = self._read_orders()
        self._kinds = self._read_kinds()
        # Where layers are checkpointed, what they run depends on the mode.
        free = STATELESS - {"training" for own in self._owns if own.get("gradient_checkpointing")}
        kinds = chain.from_iterable(
            [kind] * len(found) for (_, kind), found in zip(self._labels, self._kept, strict=True)
        )
        entries = enumerate(zip(kinds, self._keys, strict=True))
        self._free = {i for i, (kind, key) in entries if not kind and key in free}

    def _read_entries(self) -> tuple[list[str], list[object]]:
        keys = list(chain.from_iterable(self._dicts))
        return keys, list(chain.from_iterable(map(_VALUES, self._dicts)))

    def _read_kinds(self) -> list[object]:
        """What a tensor is, whatever its values."""
        kinds: list[object] = [*map(type, self._memory), *map(_DTYPE, self._memory)]
        kinds += map(Tensor.is_neg, self._parameters)
        return [*kinds, *(x._version for x in self._buffers if not x.is_inference())]

    def _read_orders(self) -> list[list[str]]:
        return [list(own["_modules"]) for own in self._lists]

    def read_places(self) -> list[object]:
        """Versions, addresses, strides and signs of the tensors."""
        reads = (_VERSION, Tensor.data_ptr, Tensor.stride, Tensor.is_neg)
        return [value for read in reads for value in map(read, self._tensors)]

    def read_memory(self) -> list[object]:
        """See `Snapshot.addresses`."""
        reads = (Tensor.data_ptr, Tensor.stride, Tensor.size)
        return [value for read in reads for value in map(read, self._memory)]

    def holds(self) -> bool:
        if any(self._empty) or list(map(type, self._modules)) != self._types:
            return False
        if not all(self._own_the_same()):
            return False
        keys, values = self._read_entries()
        if keys != self._keys or not self._are_the_same(values):
            return False
        return self._read_orders() == self._orders and self._read_kinds() == self._kinds

    def _own_the_same(self) -> Iterator[bool]:
        """Whether each module has the very dictionary that it had."""
        return map(operator.is_, map(vars, self._modules), self._owns)

    def _are_the_same(self, values: list[object]) -> bool:
        if not all(map(operator.is_, values, self._values)):
            pairs = enumerate(zip(values, self._values, strict=True))
            if not self._free.issuperset(i for i, (now, kept) in pairs if now is not kept):
                return False
            self._values = values
        return True

    def changed(self, kept_places: list[object]) -> Change | None:
        if list(map(type, self._modules)) != self._types:
            for name, module, cls in zip(self._names, self._modules, self._types, strict=True):
                if type(module) is not cls:
                    what = f"{_qualified(type(module))} now, and was a {_qualified(cls)}"
                    return Change(f"module {name} is a {what}", False)
        if not all(self._own_the_same()):
            name = self._names[list(self._own_the_same()).index(False)]
            return Change(f"module {name} has another __dict__", False)
        if any(self._empty):
            (name, kind), now = next(
                pair for pair in zip(self._empty_labels, self._empty, strict=True) if pair[1]
            )
            return _difference(f"module {name}", kind, next(iter(now)), now, {})
        if not _equal(self._dicts, self._kept) and (change := self._changed_entry()) is not None:
            return change
        if self._read_orders() != self._orders:
            return Change("the layers were put in another order", False)
        if (places := self.read_places()) == kept_places:
            return None
        count = len(self._tensors)
        at = next(i for i, (a, b) in enumerate(zip(places, kept_places, strict=True)) if a != b)
        how = (
            *("was written in place", "was moved to other memory"),
            *("has other strides", "has another sign"),
        )
        return Change(f"{self._tensor_names[at % count]} {how[at // count]}", True)

    def _changed_entry(self) -> Change | None:
        for (name, kind), now, kept in zip(self._labels, self._dicts, self._kept, strict=True):
            for key in [*kept, *(key for key in now if key not in kept)]:
                before, after = kept.get(key, _ABSENT), now.get(key, _ABSENT)
                if before is after or (_is_plain(before) and _is_plain(after) and before == after):
                    continue
                if kind or _is_watched(key, before):
                    return _difference(f"module {name}", kind, key, now, kept)
                kept.pop(key) if after is _ABSENT else kept.update({key: after})
        return None


class _Shared:
    """What modules share: their classes and configs."""

    def __init__(self, model: Any) -> None:
        types = {type(model.config), *map(type, model.modules())}
        self._mros = {cls: cls.__mro__ for cls in types}
        bases = {*PreTrainedModel.__mro__, *PreTrainedConfig.__mro__}
        self._spaces: list[tuple[type, Mapping[str, Any], Callable[[str], bool]]] = []
        for cls in {cls: None for kind in types for cls in kind.__mro__ if cls is not object}:
            is_base = cls in bases or cls.__module__.partition(".")[0] == "torch"
            counts = _CALLED.__contains__ if is_base else _is_own
            self._spaces.append((cls, vars(cls), counts))
        found = {id(own): own for module in model.modules() if (own := vars(module).get("config"))}
        self._owners = [config for config in found.values() if hasattr(config, "__dict__")]
        self._configs = list(map(vars, self._owners))
        self._kept_configs = copy.deepcopy(self._configs)
        self._hooks = [getattr(torch_module, name) for name in _GLOBAL_HOOKS]
        self._keep()
        self._state = self._read_state()

    def _read_state(self) -> list[object]:
        """All members of all classes, and what values of configs say and are."""
        values = list(chain.from_iterable(map(_VALUES, (space for _, space, _ in self._spaces))))
        for config, own in zip(self._owners, self._configs, strict=True):
            names = str(getattr(type(config), "attribute_map", None))
            values += (vars(config) is own, str(own), names, *map(type, own.values()))
        return values

    def holds(self) -> bool:
        if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
            return False
        if any(cls.__mro__ != mro for cls, mro in self._mros.items()):
            return False
        return _equal(self._configs, self._kept_configs) and _equal(self._read_state(), self._state)

    def _keep(self) -> None:
        self._sizes = [len(space) for _, space, _ in self._spaces]
        read = [(s, key) for _, s, counts in self._spaces for key in s if counts(key)]
        self._read = [space for space, _ in read], [key for _, key in read]
        self._values = list(map(operator.getitem, *self._read))
        self._kept = [{k: v for k, v in s.items() if counts(k)} for _, s, counts in self._spaces]

    def changed(self) -> Change | None:
        if any(self._hooks):
            return Change("a hook stands on all modules", False)
        if not _equal(self._configs, self._kept_configs):
            for now, kept in zip(self._configs, self._kept_configs, strict=True):
                for key in {**kept, **now}:
                    if not _equal(now.get(key, _ABSENT), kept.get(key, _ABSENT)):
                        return _difference("the config", "", key, now, kept)
        try:
            values = list(map(operator.getitem, *self._read))
        except KeyError:  # a member was taken away
            values = []
        if values == self._values and [len(space) for _, space, _ in self._spaces] == self._sizes:
            return None
        for (cls, space, counts), kept in zip(self._spaces, self._kept, strict=True):
            for key in {**kept, **space}:
                if counts(key) and space.get(key, _ABSENT) is not kept.get(key, _ABSENT):
                    return Change(f"class {_qualified(cls)} has another {key}", False)
        self._keep()
        return None


class _Code:
    """The functions and classes of torch and transformers that the forward stands on, in some of
    the looks: there are a thousand of them."""

    def __init__(self, config: Any) -> None:
        self._config, self._watch = config, families.code_watch(config)
        self._kept = self._watch.read(config)

    def holds(self) -> bool:
        return self._watch.read(self._config) == self._kept

    def changed(self, looks: Iterator[int]) -> Change | None:
        if next(looks) % CODE_EVERY or self._watch.read(self._config) == self._kept:
            return None
        return Change("code that the forward stands on was replaced", False)


def _is_own(key: str) -> bool:
    return key in _CALLED or not key.startswith("__")


def _equal(found: object, kept: object) -> bool:
    try:
        return bool(found == kept)
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array in the place of another
        return False


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))


def _is_watched(key: str, before: object) -> bool:
    """Whether an attribute may be read by a forward: not what a hook may keep there."""
    known = before is _ABSENT or _is_plain(before) or callable(before)
    return key in _KINDS or key == "config" or (known and key not in UNWATCHED)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _difference(
    where: str, kind: str, key: str, now: Mapping[str, Any], kept: Mapping[str, Any]
) -> Change:
    before, after = (_shown(found.get(key, _ABSENT)) for found in (kept, now))
    if not kind:
        return Change(f"{where} has {key}={after}, and had {before}", False)
    noun = _KINDS[kind]
    what = f"a {noun} {key}" if noun != "hook" else "a hook"
    how = "no longer has" if key not in now else "got" if key not in kept else "got in exchange"
    return Change(f"{where} {how} {what}", noun in ("parameter", "buffer"))


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "none"
    return repr(value) if _is_plain(value) else f"a {_qualified(type(value))}"
