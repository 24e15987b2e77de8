"""What a forward pass reads of a model, compared in each step with what it was at the beginning.

A change that is undone before a rollout ends leaves no trace at its end, so each step looks:

* at classes, their calls, attributes, hooks, submodules and configs, and at the place and the
  version of each weight: in parts of some ten microseconds, all of them in each step where the host
  has nothing else to do, and one of them in the others;
* at some values of each weight, all of them in a small model: a write through `.data` or from
  another library leaves the version as it was. On a GPU the values come a step later, and only
  every few steps.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from rl_consistency.models import families
from rl_consistency.models.inventory import HOOKS, UNWATCHED
from rl_consistency.rollout.device.device_state import to_host

MODULES_PER_PART = 32
NUM_VALUES = 1 << 16
"""Values of weights that are compared; of each weight 16 or more, or all."""
FEWEST_VALUES = 16
NUM_SHARES = 4  # looks that share the values
CODE_EVERY = 64  # looks between two at the code of torch and transformers
VALUES_EVERY = 8  # steps between two looks at values on a GPU

_KINDS = {"_parameters": "parameter", "_modules": "submodule", "_buffers": "buffer"} | {
    kind: "hook" for kind in HOOKS
}
_CALLED = {
    *("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"),
    *("__getattribute__", "__getitem__", "__iter__", "__len__"),
}
"""What a forward reads of the bases of all models. Libraries exchange other names there."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = object()


class Change(NamedTuple):
    """Something that is not as it was when the rollout began."""

    what: str
    of_weights: bool


class _Part(Protocol):
    def changed(self) -> Change | None: ...


class StepWatch:
    """Compares a patched model with what it is now. It keeps the weights' memory: drop it when the
    rollout ends."""

    def __init__(self, model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = list(model.named_modules())
        self._parts: list[_Part] = [_Shared(model), _Code(model.config)]
        for start in range(0, len(named), MODULES_PER_PART):
            self._parts.append(_Modules(named[start : start + MODULES_PER_PART]))
        self._values = _Values(weights)
        self._next = 0

    def look(self, is_busy: Callable[[], bool] | None = None) -> Change | None:
        """The first difference found: by all parts, or by one and as many more as fit in while a
        device `is_busy`."""
        for _ in self._parts:
            part = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            if (change := part.changed()) is not None:
                return change
            if is_busy is not None and not is_busy():
                break
        return self._values.changed()


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
        self._tensor_names: list[str] = []
        self._tensors: list[Tensor] = []
        for name, module in zip(self._names, self._modules, strict=True):
            own = vars(module)
            for kind in ("", *_KINDS):
                found = own[kind] if kind else own
                (self._labels if found else self._empty_labels).append((name, kind))
                (self._dicts if found else self._empty).append(found)
            tables = {
                key: own[key] for key in ("_rotary_table",) if key in own
            }  # a larger may come
            for key, tensor in (own["_parameters"] | own["_buffers"] | tables).items():
                if tensor is not None and not tensor.is_inference():
                    self._tensor_names.append(f"{name}.{key}")
                    self._tensors.append(tensor)
        self._kept = list(map(dict, self._dicts))
        # Dictionaries are equal in any order, and a list of layers runs in its own.
        self._lists = [vars(m) for m in self._modules if isinstance(m, nn.ModuleList)]
        self._orders = self._read_orders()
        self._places = self._read_places()

    def _read_places(self) -> list[object]:
        reads = (operator.attrgetter("_version"), Tensor.data_ptr, Tensor.stride)
        return [value for read in reads for value in map(read, self._tensors)]

    def _read_orders(self) -> list[list[str]]:
        return [list(own["_modules"]) for own in self._lists]

    def changed(self) -> Change | None:
        if list(map(type, self._modules)) != self._types:
            for name, module, cls in zip(self._names, self._modules, self._types, strict=True):
                if type(module) is not cls:
                    what = f"{_qualified(type(module))} now, and was a {_qualified(cls)}"
                    return Change(f"module {name} is a {what}", False)
        if any(self._empty):
            (name, kind), now = next(
                pair for pair in zip(self._empty_labels, self._empty, strict=True) if pair[1]
            )
            return _difference(f"module {name}", kind, next(iter(now)), now, {})
        if not _equal(self._dicts, self._kept) and (change := self._changed_entry()) is not None:
            return change
        if self._read_orders() != self._orders:
            return Change("the layers were put in another order", False)
        if (places := self._read_places()) == self._places:
            return None
        count = len(self._tensors)
        at = next(i for i, (a, b) in enumerate(zip(places, self._places, strict=True)) if a != b)
        how = ("was written in place", "was moved to other memory", "has other strides")
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
        bases = {*PreTrainedModel.__mro__, *PreTrainedConfig.__mro__}
        self._spaces: list[tuple[type, Mapping[str, Any], Callable[[str], bool]]] = []
        for cls in {cls: None for kind in types for cls in kind.__mro__ if cls is not object}:
            is_base = cls in bases or cls.__module__.partition(".")[0] == "torch"
            counts = _CALLED.__contains__ if is_base else _is_own
            self._spaces.append((cls, vars(cls), counts))
        found = {id(own): own for module in model.modules() if (own := vars(module).get("config"))}
        self._configs = [vars(config) for config in found.values() if hasattr(config, "__dict__")]
        self._kept_configs = copy.deepcopy(self._configs)
        self._hooks = [getattr(torch_module, f"_global{kind}") for kind in HOOKS]
        self._keep()

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
        self._config, self._watch, self._num_looks = config, families.code_watch(config), 0
        self._kept = self._watch.read(config)

    def changed(self) -> Change | None:
        self._num_looks += 1
        if self._num_looks % CODE_EVERY or self._watch.read(self._config) == self._kept:
            return None
        return Change("code that the forward stands on was replaced", False)


class _Values:
    """Runs of values of each weight, from places drawn at random."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        drawn = random.Random()  # of its own: the user's random numbers stay as they are
        tensors = [(name, tensor.detach()) for name, tensor in weights if tensor.numel()]
        tensors.sort(key=lambda named: named[1].numel())
        groups: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
        left = NUM_VALUES
        for i, (name, tensor) in enumerate(tensors):
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor[(0,) * (tensor.ndim - 1)]
            count = min(len(flat), max(FEWEST_VALUES, left // (len(tensors) - i)))
            left -= count
            start = drawn.randint(0, len(flat) - count)
            run = flat[start : start + count].view(_INTEGERS[flat.element_size()])
            groups.setdefault((run.device, run.element_size()), []).append((name, run))
        self._on_gpu = any(device.type == "cuda" for device, _ in groups)
        self._shares = [_Runs(g, i) for i in range(NUM_SHARES) for g in groups.values()]
        self._num_looks = 0
        self._coming: tuple[_Runs, Tensor, torch.cuda.Event | None] | None = None

    def _take(self) -> tuple[_Runs, Tensor, torch.cuda.Event | None]:
        runs = self._shares[0]
        self._shares.append(self._shares.pop(0))
        values = to_host(torch.cat(runs.runs))
        done = torch.cuda.Event() if self._on_gpu else None
        if done is not None:
            done.record()
        return runs, values, done

    def changed(self) -> Change | None:
        """A difference in what was taken, now on a CPU, before on a GPU: the host never waits."""
        if self._coming is None:
            if not self._on_gpu or self._num_looks % VALUES_EVERY == 0:
                self._coming = self._take()
            self._num_looks += 1
        if self._coming is None:
            return None
        runs, values, done = self._coming
        if done is not None and not done.query():
            return None
        self._coming = None
        differ = values.numpy() != runs.kept
        if not differ.any():
            return None
        return Change(f"{runs.name_of(int(differ.argmax()))} has other values", True)


class _Runs:
    """A share of the runs of all weights, and their values at the beginning."""

    def __init__(self, named: list[tuple[str, Tensor]], share: int) -> None:
        self._names = [name for name, _ in named]
        self.runs = [
            run
            if (size := len(run) // NUM_SHARES) < FEWEST_VALUES
            else run[size * share : len(run) if share == NUM_SHARES - 1 else size * (share + 1)]
            for _, run in named
        ]
        self.kept = torch.cat(self.runs).cpu().numpy()

    def name_of(self, place: int) -> str:
        """The weight that a value belongs to."""
        ends = np.cumsum([len(run) for run in self.runs])
        return self._names[int(np.searchsorted(ends, place, side="right"))]


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
