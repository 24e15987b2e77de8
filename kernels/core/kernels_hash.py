"""The hash that says which kernels a certificate or a recorded measurement belongs to."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1]

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def kernels_hash(folder: Path = KERNELS) -> str:
    """SHA-256 over the paths and syntax trees of the files below `folder`, in order of the paths.

    Every name, literal and statement counts. Comments, layout, docstrings and bare strings (they
    document the name above) do not. All versions of Python give the same hash.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).parts):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0")
        for token in _tokens(ast.parse(file.read_bytes())):
            digest.update(token.encode() + b"\0")
    return digest.hexdigest()


def _tokens(node: object) -> Iterator[str]:
    """A syntax tree as strings.

    Unlike `ast.dump` it leaves out empty fields: newer versions of Python add fields, which are
    empty where a file does not use them.
    """
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if isinstance(node, _DOCUMENTED) and name == "body":
                value = [statement for statement in value if not _is_string(statement)]
            if value is None and not isinstance(node, ast.Constant):
                continue
            if value == []:
                continue
            yield name
            yield from _tokens(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _tokens(item)
        yield "]"
    else:
        yield f"{type(node).__name__} {node!r}"


def _is_string(statement: ast.stmt) -> bool:
    """Whether the statement is a bare string, which is documentation."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
