"""Refuses constructs that break bit-reproducibility or hide failures.

Usage: banned_patterns.py [FILE_OR_DIRECTORY ...] (default: the repository). Prints `file:line: what
and why` for each finding and exits 1 if there is any. It reads the syntax tree, so comments,
docstrings and strings may name a construct.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_DIRECTORIES = {"build", "dist", "runs", "wandb", "node_modules"}


def _names(node: ast.expr | None) -> set[str]:
    """The class names an `except` clause catches."""
    parts = ast.walk(node) if node else ()
    return {getattr(part, "attr", getattr(part, "id", "")) for part in parts}


def _is_attribute(node: ast.AST, name: str, owner: str = "") -> bool:
    """Whether `node` is `<owner>.<name>`, of any owner if none is given."""
    if not (isinstance(node, ast.Attribute) and node.attr == name):
        return False
    return not owner or ast.unparse(node.value) == owner


def _imports(node: ast.AST, package: str, name: str = "") -> bool:
    """Whether `node` is `from package[...] import name`, or of anything if no name is given."""
    if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
        return False
    inside = f"{node.module}.".startswith(f"{package}.")
    return inside and (not name or name in [alias.name for alias in node.names])


def _is_unsafe_load(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and _is_attribute(node.func, "load", "torch")):
        return False
    return "weights_only=True" not in map(ast.unparse, node.keywords)


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches errors without naming them. A handler that raises again may catch all."""
    caught, last = _names(handler.type), handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    everything = not caught or "BaseException" in caught
    return "Exception" in caught or (everything and not raises_again)


def _counter(node: ast.AST) -> ast.AST | None:
    """The atomic addition of a literal whole number that `node` allows: a count is the same in any
    order, and its result is unused, or compared with `==`. A number taken from the counter would
    differ from run to run."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(node, ast.Compare) and [type(op) for op in node.ops] == [ast.Eq]:
        call = node.left
    if not (isinstance(call, ast.Call) and _is_attribute(call.func, "atomic_add")):
        return None
    counted = call.args[1] if len(call.args) > 1 else None
    whole = isinstance(counted, ast.Constant) and type(counted.value) is int
    return call.func if whole else None


def _finding(node: ast.AST) -> str | None:
    """Why `node` is banned, or None."""
    if _is_attribute(node, "atomic_add") or _imports(node, "triton", "atomic_add"):
        return "tl.atomic_add: the order of atomic additions varies from run to run"
    if _is_attribute(node, "autotune", "triton") or _imports(node, "triton", "autotune"):
        return "triton.autotune: a schedule is chosen from a table proved bit-neutral"
    if isinstance(node, ast.ExceptHandler) and _swallows(node):
        return "except Exception: name the error that is expected, let the others surface"
    if isinstance(node, ast.keyword) and node.arg == "warn_only":
        return "warn_only: a nondeterministic op is an error, not a warning"
    imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if "kernels" in {name.split(".")[0] for name in imported} or _imports(node, "kernels"):
        return "import kernels, from kernels import: Hugging Face's; use rl_consistency.kernels"
    if _is_unsafe_load(node) or _imports(node, "torch", "load"):
        return "torch.load without weights_only=True: a checkpoint must not run code"
    return None


def findings_in(source: str, filename: str) -> list[str]:
    """`filename:line: reason` for each banned construct; SyntaxError if `source` is no Python."""
    tree = ast.parse(source, filename)
    counters = {_counter(node) for node in ast.walk(tree)}
    found = [
        (getattr(node, "lineno", 0), reason)
        for node in ast.walk(tree)
        if node not in counters and (reason := _finding(node)) is not None
    ]
    return [f"{filename}:{line}: {reason}" for line, reason in sorted(found)]


def python_files(path: Path) -> Iterator[Path]:
    """The `.py` files at or below `path`, without hidden folders and links to folders."""
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise FileNotFoundError(f"no such file or directory: {path}")
    for folder, below, files in os.walk(path):
        below[:] = sorted(n for n in below if n[0] != "." and n not in SKIPPED_DIRECTORIES)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [ROOT]
    files = [file for path in paths for file in python_files(path)]
    found = [line for file in files for line in findings_in(file.read_text("utf-8"), str(file))]
    print("\n".join(found) or f"banned patterns: none in {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
