"""Which kernels these are: what certificates and recorded measurements hold for."""

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
    """SHA-256 over what the code below `folder` means, file by file in order of their paths.

    A file counts as its path in `folder` and its syntax tree. Comments, docstrings (bare strings
    too: they document the name above) and layout do not count; every name, literal and statement
    does. All versions of Python give one hash.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).parts):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0")
        for token in _tokens(ast.parse(file.read_bytes())):
            digest.update(token.encode() + b"\0")
    return digest.hexdigest()


def _tokens(node: object) -> Iterator[str]:
    """A syntax tree as strings, one list of them for one tree.

    `ast.dump` would do but for fields that newer versions of Python add: they are empty where a
    file does not use them, so an empty field is left out.
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
    """Whether it is a string that nothing reads: documentation."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
