"""Arrows point one way: a file imports from lower ranks or its own folder."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rl_consistency"

ROOMS = {
    "kernels": ROOT / "kernels",
    "numerics": ROOT / PACKAGE / "numerics",
    "models": ROOT / PACKAGE / "models",
    "rollout": ROOT / PACKAGE / "rollout",
    "parity": ROOT / PACKAGE / "parity",
    "trainers": ROOT / "trainers",
    "verify": ROOT / PACKAGE / "verify",
    "cli": ROOT / PACKAGE / "cli",
}
RANK = {room: rank for rank, room in enumerate(ROOMS)}
ADAPTER_ONLY = {"deepspeed", "wandb", "trl"}
NUMERIC_CORE = ("kernels", "numerics", "models", "rollout", "parity")
FILES = [(room, file) for room, folder in ROOMS.items() for file in sorted(folder.glob("**/*.py"))]


def imported_modules(source):
    """The dotted names that `source` imports, anywhere in it; relative ones start with a dot."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            # `from rl_consistency import models` names the room only in its alias.
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def violations(room, source):
    """What `source`, a file of `room`, imports and may not."""
    found = []
    for name in sorted(imported_modules(source)):
        top, *rest = name.split(".")
        if name.startswith("."):
            found.append(f"{name}: relative import")
        elif top == PACKAGE:
            if name == PACKAGE:
                continue  # judged by the names taken from it
            target = rest[0]
            if target not in RANK:
                found.append(f"{name}: not in a room; the public names are for callers")
            elif RANK[target] > RANK[room]:
                found.append(f"{name}: {target} ranks above {room}")
        elif room == "kernels" and top not in {"torch", "triton", *sys.stdlib_module_names}:
            found.append(f"{name}: a kernel imports only torch, triton and the standard library")
        elif room in NUMERIC_CORE and top in ADAPTER_ONLY:
            found.append(f"{name}: the numeric core runs without it")
    return found


@pytest.mark.parametrize(
    ("room", "file"), FILES, ids=[str(file.relative_to(ROOT)) for _, file in FILES]
)
def test_a_file_imports_only_from_lower_ranks(room, file):
    assert violations(room, file.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from rl_consistency.numerics.strict import strict"),
        ("kernels", "import numpy as np"),
        ("kernels", "def f():\n    import transformers"),
        ("numerics", "from rl_consistency import models"),
        ("rollout", "import rl_consistency.trainers.losses"),
        ("rollout", "import wandb"),
        ("parity", "from trl import GRPOTrainer"),
        ("models", "from .patch import patch"),
        ("trainers", "from rl_consistency import patch"),
        ("trainers", "from rl_consistency.cli.main import main"),
    ],
)
def test_an_import_against_the_ranks_is_found(room, source):
    assert violations(room, source)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        (
            "kernels",
            "import math\nimport torch\nfrom rl_consistency.kernels.matmul.op import matmul",
        ),
        ("rollout", "import numpy\nfrom rl_consistency import kernels, models"),
        ("trainers", "import wandb\nfrom rl_consistency.trainers.data.examples import Example"),
    ],
)
def test_an_import_along_the_ranks_is_not(room, source):
    assert violations(room, source) == []


def test_every_room_has_files_to_check():
    assert {room for room, _ in FILES} == set(ROOMS)


@pytest.mark.parametrize("folder", ["kernels", "trainers"])
def test_the_linked_folders_are_namespace_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()


def test_importing_the_package_does_nothing_heavy():
    heavy = ["torch", "transformers", "triton", "accelerate", "numpy", "matplotlib", "rich"]
    code = (
        "import sys\nbefore = set(sys.modules)\nimport rl_consistency\n"
        f"print(sorted((set(sys.modules) - before) & {set(heavy)!r}))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
