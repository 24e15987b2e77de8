"""Whether the code that runs is what the installed files say.

A part of a forward is trusted by identity: the object that is really called is compared with what
its file compiles to, and the file with the digest that its package was installed with (RECORD of
the wheel, see the packaging specification of binary distributions). Names, `__module__` and
`functools.wraps` prove nothing. Files are read and compiled once in a process.
"""

from __future__ import annotations

import ast
import base64
import builtins
import hashlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from importlib.util import resolve_name
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

PROTOCOL = (
    *("forward", "__init__", "__call__", "_call_impl", "_wrapped_call_impl"),
    *("__getattr__", "__getattribute__", "__setattr__"),
)
"""Members by which a module is called and read; a class without one has its base's."""

_CALLED = tuple(name for name in PROTOCOL if name != "__init__")
EVERY = "*"
"""Stands for all functions of a file, beside the names of its classes that count."""

_WRAPPERS = {"no_grad": "context_decorator"}
"""Decorator -> the function whose inner function it leaves, where the names differ."""

_MISSING = object()
_CONTENTS = attrgetter("cell_contents")
_PARTS_OF_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Difference(NamedTuple):
    """A place that holds something else than its installed file makes."""

    place: str
    found: str

    def __str__(self) -> str:
        return f"{self.place} was replaced by {self.found}"


class InstalledFile:
    """One module of an installed package: its file's digest, and what the text compiles to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.package = name.partition(".")[0]
        path, recorded = _record(name)
        text = path.read_bytes() if path is not None else b""
        digest = hashlib.sha256(text).digest()
        self.digest = digest.hex()
        self.fault = ""
        """Why the file proves nothing; empty if it is as it was installed."""
        if path is None:
            self.fault = "code of no installed file"
        elif not recorded:
            self.fault = f"code that {self.package} was installed with no digest of (editable?)"
        elif recorded != base64.urlsafe_b64encode(digest).rstrip(b"=").decode():
            self.fault = f"an edited file, {path}"
        is_package = path is not None and path.stem == "__init__"
        self._package = name if is_package else name.rpartition(".")[0]
        tree = ast.parse(text)
        self.code: dict[str, list[CodeType]] = {}
        self._collect(compile(tree, str(path), "exec", dont_inherit=True))
        self.all_code = {code for found in self.code.values() for code in found}
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        """Qualified name -> definitions, of functions of the file and of its classes."""
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        """Name -> the module and the attribute, if any, that the file imports under it."""
        self.assigned: dict[str, ast.expr] = {}
        """Name -> what the file assigns to it, of values outside classes."""
        self._read(tree.body)
        called = {name for code in self.all_code for name in code.co_names if name[:2] != "__"}
        called &= vars(builtins).keys()
        self.builtins = called - {*self.imports, *self.assigned, *self.functions, *self.classes}
        """Names of Python's own that the code reads."""

    def _collect(self, code: CodeType) -> None:
        self.code.setdefault(code.co_qualname, []).append(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._collect(constant)

    def _read(self, body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            match node:
                case ast.FunctionDef():
                    self.functions.setdefault(prefix + node.name, []).append(node)
                case ast.ClassDef() if not prefix:
                    self.classes[node.name] = node
                    self._read(node.body, f"{node.name}.")
                case ast.If() | ast.Try():
                    rest = [h.body for h in node.handlers] if isinstance(node, ast.Try) else []
                    for inner in (node.body, *rest, node.orelse):
                        self._read(inner, prefix)
                case ast.Import() if not prefix:
                    for alias in node.names:
                        bound = alias.asname or alias.name.partition(".")[0]
                        self.imports[bound] = (alias.name if alias.asname else bound), ""
                case (
                    ast.Assign(targets=[ast.Name(id=target)], value=ast.expr() as value)
                    | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                ) if not prefix:
                    self.assigned[target] = value
                case ast.ImportFrom() if not prefix:
                    origin = "." * node.level + (node.module or "")
                    origin = resolve_name(origin, self._package)
                    for alias in node.names:
                        self.imports[alias.asname or alias.name] = origin, alias.name
                case _:
                    pass
        if not prefix:
            for name in (*self.assigned, *self.functions, *self.classes):
                self.imports.pop(name, None)

    def members(self, name: str) -> set[str]:
        """Names of the functions of a class, without those of its bases."""
        start = f"{name}."
        return {key.removeprefix(start) for key in self.functions if key.startswith(start)}


def _record(name: str) -> tuple[Path | None, str]:
    """The installed file of a module, and its SHA-256 as RECORD writes it, empty without one."""
    inside = name.replace(".", "/")
    try:
        distribution = metadata.distribution(name.partition(".")[0])
    except metadata.PackageNotFoundError:
        return None, ""
    for line in (distribution.read_text("RECORD") or "").splitlines():
        file, _, rest = line.partition(",")
        if file in (f"{inside}.py", f"{inside}/__init__.py"):
            recorded = rest.partition(",")[0].removeprefix("sha256=")
            return Path(str(distribution.locate_file(file))), recorded
    own = getattr(sys.modules.get(name), "__file__", None)
    return (Path(own), "") if own and own.endswith(".py") else (None, "")


installed = cache(InstalledFile)
"""The file of a module by its name; read once in a process."""


def differences(name: str, names: Collection[str]) -> Iterator[Difference]:
    """What a module holds that its file does not make: the functions and classes of these names,
    with bases and members, and all names that the file imports."""
    file, space = installed(name), vars(sys.modules[name])
    if file.fault:
        yield Difference(name, file.fault)
        return
    for key, (origin, attribute) in file.imports.items():
        found, right = space.get(key, _MISSING), _imported(origin, attribute)
        if found is not right and _MISSING not in (found, right):
            yield Difference(f"{name}.{key}", described(found))
    for key in file.builtins & space.keys():
        yield Difference(f"{name}.{key}", described(space[key]))
    for key, value in file.assigned.items():
        cls = _resolved(value.func, space) if isinstance(value, ast.Call) else None
        if isinstance(cls, type) and type(found := space.get(key)) is not cls:
            yield Difference(f"{name}.{key}", described(found))
    for key, nodes in file.functions.items():
        if "." not in key and (key in names or EVERY in names):
            found = space.get(key, _MISSING)
            if what := _function_differs(file, key, nodes, found, space):
                yield Difference(f"{name}.{key}", what)
    for key, node in file.classes.items():
        if key in names:
            yield from _class_differs(file, node, space)


def _imported(origin: str, attribute: str) -> Any:
    module = sys.modules.get(origin)
    if not attribute:
        return module or _MISSING
    inner = sys.modules.get(f"{origin}.{attribute}", _MISSING)
    return getattr(module, attribute, inner) if module is not None else _MISSING


def _class_differs(
    file: InstalledFile, node: ast.ClassDef, space: dict[str, Any]
) -> Iterator[Difference]:
    place, cls = f"{file.name}.{node.name}", space.get(node.name)
    if not isinstance(cls, type) or (cls.__module__, cls.__qualname__) != (file.name, node.name):
        yield Difference(place, described(cls))
        return
    bases = [_resolved(base, space) for base in node.bases]
    if _MISSING not in bases and tuple(bases or [object]) != cls.__bases__:
        yield Difference(place, f"a class of the bases {', '.join(map(described, cls.__bases__))}")
    members = file.members(node.name)
    known = {*members}
    for name, value in _assigned_names(node):  # as `__call__ = _wrapped_call_impl`
        known.add(name)
        found, right = vars(cls).get(name), _resolved(value, {**space, **vars(cls)})
        if found is not right:
            yield Difference(place, f"a class with another {name}: {described(found)}")
    if cls is nn.Module:  # no forward calls the rest, which libraries change
        members &= {*_CALLED}
    for member in sorted(members):
        nodes = file.functions[f"{node.name}.{member}"]
        found = vars(cls).get(member, _MISSING)
        around = [*node.decorator_list, *node.bases]
        if what := _function_differs(file, f"{node.name}.{member}", nodes, found, space, around):
            yield Difference(place, f"a class with another {member}: {what}")
    for member in PROTOCOL:
        if member in vars(cls) and member not in known:
            found = vars(cls)[member]
            yield Difference(place, f"a class with another {member}: {described(found)}")
    for base in cls.__mro__[1:-1]:
        yield from _call_differs(base)


def _member_differs(base: type, member: str, found: Any) -> str:
    """What a member of a base is where its file does not make it; empty if it does."""
    file, key = installed(base.__module__), f"{base.__qualname__}.{member}"
    space = vars(sys.modules[base.__module__])
    return file.fault or _function_differs(file, key, file.functions.get(key, []), found, space)


def _call_differs(base: type) -> Iterator[Difference]:
    """How a base is called and read where another class than `nn.Module` says so."""
    for member in _CALLED if base is not nn.Module else ():
        found = vars(base).get(member, _MISSING)
        if found is not _MISSING and (what := _member_differs(base, member, found)):
            place = f"{base.__module__}.{base.__qualname__}"
            yield Difference(place, f"a class with another {member}: {what}")


def _assigned_names(node: ast.ClassDef) -> Iterator[tuple[str, ast.Name]]:
    """Members that the body of a class makes of other names."""
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            one = isinstance(statement, ast.AnnAssign)
            for target in [statement.target] if one else statement.targets:
                if isinstance(target, ast.Name) and isinstance(statement.value, ast.Name):
                    yield target.id, statement.value


def _function_differs(
    file: InstalledFile,
    name: str,
    nodes: list[ast.FunctionDef],
    found: Any,
    space: dict[str, Any],
    around: list[ast.expr] | None = None,
) -> str:
    """What an object is where it is not the function of these definitions; empty if it is.
    `around`: decorators and bases of its class, which may wrap it too."""
    decorators = [d for node in nodes for d in node.decorator_list]
    allowed = [_tail(expression) for expression in (*decorators, *(around or ()))]
    functions = [found]
    if isinstance(found, staticmethod | classmethod):
        functions = [found.__func__]
    elif isinstance(found, property) and ("property" in allowed or "setter" in allowed):
        functions = [f for f in (found.fget, found.fset, found.fdel) if f is not None]
    for function in functions:
        inner = _unwrapped(function, file.code.get(name, []), allowed)
        if inner is None:
            return described(function)
        if inner.__globals__ is not space:
            return f"a copy with other globals of {described(inner)}"
        if not any(_has_defaults(inner, node, space) for node in nodes):
            return "a function with other defaults"
    return ""


def _unwrapped(function: Any, codes: list[CodeType], allowed: list[str]) -> Any:
    """The function of one of these codes inside wrappers that its decorators leave; None if it is
    another. Each decorator wraps once."""
    left = [_WRAPPERS.get(name, name) for name in allowed]
    while getattr(function, "__code__", None) not in codes:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(function, nn.Module):  # Hugging Face's kernels makes modules of functions
            forward = vars(function).get("forward", type(function).forward)
            inner = _closed_over(forward, "func") if written_in(forward) else None
            wrapper = next((name for name in left if "kernel" in name), "")
        elif isinstance(function, FunctionType):
            wrapper = function.__code__.co_qualname.partition(".")[0]
            if not written_in(function) or inner not in _closure(function):
                return None
            context = getattr(_closed_over(function, "ctx_factory"), "__self__", None)
            if wrapper == _WRAPPERS["no_grad"] and type(context) is not torch.no_grad:
                return None
        elif type(function) is type(installed):  # the class of functools
            wrapper = "lru_cache" if "lru_cache" in left else "cache"
        else:
            return None
        if inner is None or wrapper not in left:
            return None
        left.remove(wrapper)
        function = inner
    return function


def _closure(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _closed_over(function: Any, name: str) -> Any:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return _closure(function)[names.index(name)] if name in names else None


def written_in(function: Any) -> str:
    """The module whose installed file a function is written in, and that it runs in; empty for all
    else, whatever it is named."""
    if type(function) is not FunctionType:
        return ""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    if module is None or function.__globals__ is not vars(module):
        return ""
    file = installed(name)
    return name if not file.fault and function.__code__ in file.all_code else ""


def homes(call: Any) -> set[str]:
    """`written_in` of a callable and of all callables that it is bound to or closes over, modules
    and classes excepted."""
    found, seen, left = set[str](), set[int](), [call]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) is partial:
            around = [each.func, *each.args, *each.keywords.values()]
        else:
            if not isinstance(each, FunctionType):  # a method, or an object that can be called
                each = each.__func__ if type(each) is MethodType else type(each).__call__
            found.add(written_in(each))
            around = _closure(each) if isinstance(each, FunctionType) else []
        left += [o for o in around if callable(o) and not isinstance(o, (nn.Module, type))]
    return found


def _has_defaults(function: FunctionType, node: ast.FunctionDef, space: dict[str, Any]) -> bool:
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    by_name = {argument.arg: default for argument, default in named if default is not None}
    found = function.__defaults__ or (), function.__kwdefaults__ or {}
    if len(found[0]) != len(node.args.defaults) or found[1].keys() != by_name.keys():
        return False
    pairs = [*zip(found[0], node.args.defaults, strict=True)]
    pairs += [(found[1][key], default) for key, default in by_name.items()]
    for value, expression in pairs:
        right = _resolved(expression, space)
        if (
            right is not _MISSING
            and value is not right
            and (type(value), value)
            != (
                type(right),
                right,
            )
        ):
            return False
    return True


def _resolved(expression: ast.expr, space: Mapping[str, Any]) -> Any:
    """The value of a literal or of a dotted name; `_MISSING` for any other expression."""
    if isinstance(expression, ast.Name):
        builtin = getattr(space.get("__builtins__"), expression.id, _MISSING)
        return space.get(expression.id, builtin)
    if isinstance(expression, ast.Attribute):
        return getattr(_resolved(expression.value, space), expression.attr, _MISSING)
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return _MISSING


def _tail(expression: ast.expr) -> str:
    """The last name of `a.b`, `a.b(...)` and `a.b[...]`."""
    if isinstance(expression, ast.Call):
        return _tail(expression.func)
    if isinstance(expression, ast.Subscript):
        return _tail(expression.value)
    return getattr(expression, "attr", getattr(expression, "id", ""))


def home(function: Any) -> str:
    """The module that a function was written in; `functools.wraps` does not hide it."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def described(found: Any) -> str:
    """What an object is, in words of an error."""
    if found is _MISSING:
        return "nothing"
    if isinstance(found, type):
        return f"the class {found.__module__}.{found.__qualname__}"
    if isinstance(found, property | partial):
        kind = type(found).__name__
        inner = found.fget if isinstance(found, property) else found.func
        return f"a {kind} of a function of {home(inner)}"
    code = getattr(found, "__code__", None)
    return f"a function of {home(found)}" + (f" ({code.co_qualname})" if code else "")


def is_builtin(found: Any, name: str) -> bool:
    """Whether an object is the function of this name that a library has compiled in."""
    return isinstance(found, BuiltinFunctionType) and found.__name__ == name


def origin(found: Any) -> str:
    """The module that has this very object under the name it was written with; empty where the
    object is a partial, or a wrapper that its module does not know."""
    inner = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    space = getattr(inner, "__globals__", {})
    own = inner is not None and space.get(inner.__name__) is found
    return space.get("__name__", "") if own else ""


class Watch:
    """The objects in some modules and classes, to be read in some microseconds."""

    def __init__(self, places: Mapping[str, Collection[str]]) -> None:
        self._keys: list[tuple[Any, tuple[str, ...]]] = []
        self._assigned: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._classes: list[type] = []
        for name, names in places.items():
            file, space = installed(name), vars(sys.modules[name])
            own = {k for k in file.functions if "." not in k and (k in names or EVERY in names)}
            classes = file.classes.keys() & {*names}
            self._keys.append((space, (*own, *classes, *file.imports)))
            self._assigned.append((space, (*file.assigned,)))
            self._keys.append((space, (*file.builtins,)))
            for key in classes:
                if isinstance(cls := space.get(key), type):
                    self._classes.append(cls)
                    members = (*file.members(key), *PROTOCOL)
                    self._keys.append((vars(cls), members if cls is not nn.Module else _CALLED))
        # Their identities are compared: two tables may be equal. Those that are held keep theirs.
        self._held = [space.get(key) for space, keys in self._assigned for key in keys]
        held = [mapping.get(key) for mapping, keys in self._keys for key in keys]
        self._functions = [f for f in held if isinstance(f, FunctionType)]
        self._modules = [m for m in held if isinstance(m, nn.Module)]
        self._cells = [cell for f in self._functions for cell in f.__closure__ or ()]

    def read(self) -> tuple[object, ...]:
        """What stands there now; equal for equal states."""
        values = [value for mapping, keys in self._keys for value in map(mapping.get, keys)]
        values += map(_PARTS_OF_CODE, self._functions)
        for cls in self._classes:  # of itself or of any base
            values += (cls.__bases__, *(getattr(cls, member, None) for member in _CALLED))
        values += map(_CONTENTS, self._cells)
        values += (id(v) for space, keys in self._assigned for v in map(space.get, keys))
        return *values, *(module.forward for module in self._modules)
