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
    files = [_statements_and_names(path, folder) for path in sorted(folder.rglob("*.py"))]
    trees = {
        names[name]: _sha256(_tokens(statement, {}))
        for statements, names in files
        for statement in statements
        for name in _defined(statement)
    }
    found = [
        _sha256(_tokens(statement, meanings))
        for statements, names in files
        for meanings in [_resolved(names, trees)]
        for statement in statements
    ]
    return _sha256(sorted(found))


def _statements_and_names(path: Path, folder: Path) -> tuple[list[ast.stmt], dict[str, str]]:
    """The statements of one file, and the dotted paths that its global names stand for."""
    module = ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts))
    tree = ast.parse(path.read_bytes())
    statements = [s for s in tree.body if not _is_string(s) and not isinstance(s, _Imports)]
    names = {name: f"{module}.{name}" for s in statements for name in _defined(s)}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, _Imports) else ():
            first = alias.name.split(".")[0]
            if isinstance(node, ast.ImportFrom):
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            else:
                names[alias.asname or first] = alias.name if alias.asname else first
    return statements, names


def _defined(statement: ast.stmt) -> list[str]:
    """The global names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return [node.id for node in nodes if isinstance(node.ctx, ast.Store)]


def _resolved(names: dict[str, str], trees: dict[str, str]) -> dict[str, str]:
    """What each dotted name of a file means: the tree of a definition, or a path outside."""

    def meant(path: str) -> str:
        return f"{path.rpartition('.')[2]} {trees[path]}"

    found = {}
    for name, path in names.items():
        if path in trees:
            found[name] = meant(path)
        elif path.startswith(PACKAGE):  # a module of ours: what is taken from it is what counts
            inner = [other for other in trees if other.startswith(f"{path}.")]
            found |= {f"{name}.{other.removeprefix(f'{path}.')}": meant(other) for other in inner}
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
            if value != [] and (value is not None or isinstance(node, ast.Constant)):
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
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
