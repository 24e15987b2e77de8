"""The hash that says which kernels a certificate or a recorded measurement belongs to."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1]
PACKAGE = "rl_consistency.kernels"

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Imports = (ast.Import, ast.ImportFrom)


@cache
def kernels_hash(folder: Path = KERNELS) -> str:
    """SHA-256 over the definitions in the files below `folder`, wherever they stand.

    A definition is a statement of a module: a function, a class, an assignment, a call. Its syntax
    tree counts with every name and literal. A name that stands for another definition counts as
    that definition's tree, and a name from outside as its dotted path. So a definition that moves
    to another file changes nothing, and one that takes another function of the same name does.

    Files, the order of definitions, imports that nothing uses, comments, layout, docstrings and
    bare strings (they document the name above) do not count. All versions of Python give the same
    hash.
    """
    files = [_File(path, folder) for path in sorted(folder.rglob("*.py"))]
    trees = {
        f"{file.module}.{name}": _sha256(_tokens(statement, {}))
        for file in files
        for statement in file.statements
        for name in _defined(statement)
    }
    found = [
        _sha256(_tokens(statement, _resolved(file.names, trees)))
        for file in files
        for statement in file.statements
    ]
    return _sha256(sorted(found))


class _File:
    """The statements of one file, and what its global names stand for."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.module = ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts))
        tree = ast.parse(path.read_bytes())
        self.statements = [
            s for s in tree.body if not _is_string(s) and not isinstance(s, _Imports)
        ]
        self.names = {
            name: f"{self.module}.{name}" for s in self.statements for name in _defined(s)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"


def _defined(statement: ast.stmt) -> list[str]:
    """The global names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return [
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
    return []


def _resolved(names: dict[str, str], trees: dict[str, str]) -> dict[str, str]:
    """What each dotted name of a file means: the tree of a definition, or a path outside."""
    found = {}
    for name, path in names.items():
        if path in trees:
            found[name] = f"{path.rpartition('.')[2]} {trees[path]}"
        elif path.startswith(PACKAGE):  # a module of ours: what is taken from it is what counts
            prefix = f"{path}."
            found.update(
                (f"{name}.{inner.removeprefix(prefix)}", f"{inner.rpartition('.')[2]} {tree}")
                for inner, tree in trees.items()
                if inner.startswith(prefix)
            )
        else:
            found[name] = path
    return found


def _sha256(tokens: Iterator[str] | list[str]) -> str:
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.encode() + b"\0")
    return digest.hexdigest()


def _tokens(node: object, meanings: dict[str, str]) -> Iterator[str]:
    """A syntax tree as strings, its names as what they mean.

    Unlike `ast.dump` it leaves out empty fields: newer versions of Python add fields, which are
    empty where a file does not use them.
    """
    if isinstance(node, ast.Name | ast.Attribute) and (meaning := meanings.get(_dotted(node))):
        yield f"({meaning})"
    elif isinstance(node, _Imports):
        return
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if isinstance(node, _DOCUMENTED) and name == "body":
                value = [statement for statement in value if not _is_string(statement)]
            if value is None and not isinstance(node, ast.Constant):
                continue
            if value == []:
                continue
            yield name
            yield from _tokens(value, meanings)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _tokens(item, meanings)
        yield "]"
    else:
        yield f"{type(node).__name__} {node!r}"


def _dotted(node: ast.AST) -> str:
    """`a.b` of a name or an attribute of one, empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _is_string(statement: ast.stmt) -> bool:
    """Whether the statement is a bare string, which is documentation."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
