"""The house: arrows point one way, files stay short, and every operation's folder reads alike."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rl_consistency"

FLOORS = (
    ("kernels",),
    ("cases",),
    ("numerics",),
    ("models",),
    ("rollout",),
    ("parity",),
    ("distributed",),
    ("integrations",),
    ("trainers",),
    ("verify",),
    ("tuning",),
    ("cli",),
    ("benchmarks",),
)
"""Rooms from the ground up. A room imports from floors below its own."""

KERNEL_FLOORS = (
    ("core",),
    ("reduction",),
    ("matmul",),
    ("gradient_fold",),
    ("pointwise", "rms_norm"),
    ("linear",),
    ("attention", "sampling"),
    ("experts", "token_logprobs"),
)
"""Folders of `kernels/`, likewise."""

OPERATIONS = tuple(folder for floor in KERNEL_FLOORS[2:] for folder in floor)
"""Folders that hold one operation each."""

DEVICES = ("cpu", "triton", "hopper")
MOST_LINES = 500
"""Lines of a file; a kernel that is one idea may take more."""
MOST_LINES_OF_A_KERNEL = 800
NUMERIC_CORE = ("kernels", "cases", "numerics", "models", "rollout", "parity")
ADAPTER_ONLY = {"deepspeed", "wandb", "trl"}


def tracked_files():
    """Paths in the repository, links and deleted files left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [PurePosixPath(line) for line in done.stdout.splitlines()]
    return sorted(p for p in paths if (ROOT / p).is_file() and not (ROOT / p).is_symlink())


FILES = tracked_files()
PYTHON = [path for path in FILES if path.suffix == ".py"]
SOURCES = {
    path: (ROOT / path).read_text("utf-8")
    for path in PYTHON
    if path.parts[0] in {PACKAGE, "kernels", "trainers", "benchmarks"}
}


def module_name(path):
    """`kernels/matmul/op.py` -> `rl_consistency.kernels.matmul.op`."""
    parts = path.with_suffix("").parts
    if parts[0] in {"kernels", "trainers"}:
        parts = (PACKAGE, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source):
    """The dotted names that `source` imports, anywhere in it; relative ones start with a dot."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            # `from rl_consistency import models` names the room in its alias only.
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def arrows(sources):
    """Module -> the modules of `sources` that it imports."""
    modules = {module_name(path): source for path, source in sources.items()}
    return {
        module: {name for name in imported_names(source) if name in modules and name != module}
        - {PACKAGE}
        for module, source in modules.items()
    }


def circle(graph):
    """One circle of imports, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def kernel_folder_arrows(graph):
    """The same between the folders of `kernels/`."""
    folders = {}
    for module, targets in graph.items():
        if room_of(module) == "kernels":
            folder = module.split(".")[2]
            found = folders.setdefault(folder, set())
            found |= {target.split(".")[2] for target in targets} - {folder}
    return folders


def floor_of(room, floors):
    """The floor a room is on, counted from 0; None for a name that is no room."""
    return next((i for i, rooms in enumerate(floors) if room in rooms), None)


def room_of(module):
    """`rl_consistency.kernels.matmul.op` -> `kernels`; `benchmarks.timing` -> `benchmarks`."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else parts[0]


def arrows_upward(path, source):
    """What a file imports and may not, by name and reason."""
    module = module_name(path)
    room, found = room_of(module), []
    for name in sorted(imported_names(source)):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(f"{name}: relative import")
        elif top in {PACKAGE, "benchmarks"}:
            if name == PACKAGE:
                continue  # judged by the names taken from it
            own, other = floor_of(room, FLOORS), floor_of(room_of(name), FLOORS)
            if other is None:
                found.append(f"{name}: not in a room; the public names are for callers")
            elif other > own:
                found.append(f"{name}: a floor above {room}")
            elif room == room_of(name) == "kernels":
                found += _upward_in_kernels(module, name)
        elif room == "kernels" and top not in {"torch", "triton", *sys.stdlib_module_names}:
            found.append(f"{name}: a kernel imports only torch, triton and the standard library")
        elif room in NUMERIC_CORE and top in ADAPTER_ONLY:
            found.append(f"{name}: the numeric core runs without it")
    return found


def _upward_in_kernels(module, name):
    own = module.split(".")[2]
    other = (*name.split("."), "", "")[2]
    if other in {"", own}:
        return []
    levels = floor_of(own, KERNEL_FLOORS), floor_of(other, KERNEL_FLOORS)
    if None in levels:
        return [f"{name}: {own} or {other} has no floor in KERNEL_FLOORS"]
    return [f"{name}: a floor above kernels/{own}, or beside it"] if levels[1] >= levels[0] else []


def grammar_faults(folder, sources):
    """How an operation's folder breaks the grammar; `sources` are its files by path in it."""
    found = []
    if PurePosixPath("op.py") not in sources:
        # A small op is one file.
        if not all("ORDER = " in source for source in sources.values()):
            found.append("op.py is missing")
    elif "ORDER = " not in sources[PurePosixPath("op.py")]:
        found.append("op.py states no ORDER")
    for path, source in sources.items():
        on_device = path.stem.rpartition("_")[2] in DEVICES or path.parts[0] in DEVICES
        on_device |= "ORDER = " in source
        kernels = [d for d in _decorators(source) if d.endswith(".jit")]
        if kernels and not on_device:
            found.append(f"{path} holds device code ({kernels[0]}) and names no device")
        if path.stem in {"schedules", "table"}:
            found += [
                f"{path} is a leaf and imports {name}"
                for name in imported_names(source)
                if _is_device_module(name)
            ]
    return found


def _decorators(source):
    return [
        ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]


def _is_device_module(name):
    """Whether `name` is a file of kernels, or is inside one; core and plain data are not."""
    if not name.startswith(f"{PACKAGE}.kernels.") or name.startswith(f"{PACKAGE}.kernels.core"):
        return False
    return any(part.rpartition("_")[2] in DEVICES or part == "op" for part in name.split(".")[3:])


FRONT_DOOR = {path for path in SOURCES if path.parts[0] == PACKAGE and len(path.parts) == 2}
"""`__init__` and `__main__` name every room."""


@pytest.mark.parametrize("path", sorted(SOURCES.keys() - FRONT_DOOR), ids=str)
def test_a_file_imports_only_from_lower_floors(path):
    assert arrows_upward(path, SOURCES[path]) == []


def test_no_import_goes_in_circles():
    graph = arrows(SOURCES)
    assert len(graph) > 150
    assert circle(graph) is None
    assert circle(kernel_folder_arrows(graph)) is None


def test_no_file_is_long():
    lines = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path in PYTHON}
    most = {"kernels": MOST_LINES_OF_A_KERNEL}
    long = {str(p): n for p, n in lines.items() if n > most.get(p.parts[0], MOST_LINES)}
    assert long == {}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_follows_the_grammar(operation):
    folder = PurePosixPath("kernels", operation)
    sources = {p.relative_to(folder): s for p, s in SOURCES.items() if p.is_relative_to(folder)}
    assert grammar_faults(operation, sources) == []


def test_every_room_and_kernel_folder_has_a_floor():
    rooms = {room_of(module_name(path)) for path in SOURCES} - {PACKAGE, "__main__"}
    assert rooms == {room for floor in FLOORS for room in floor}
    folders = {path.parts[1] for path in SOURCES if path.parts[0] == "kernels"}
    assert folders == {folder for floor in KERNEL_FLOORS for folder in floor}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/matmul/op.py", "from rl_consistency.numerics.strict import strict"),
        ("kernels/matmul/op.py", "import numpy as np"),
        ("kernels/matmul/op.py", "def f():\n    import transformers"),
        ("kernels/matmul/op.py", "from rl_consistency.kernels.linear.op import linear"),
        ("kernels/pointwise/glu.py", "from rl_consistency.kernels import rms_norm"),
        ("rl_consistency/numerics/a.py", "from rl_consistency import models"),
        ("rl_consistency/rollout/a.py", "import rl_consistency.trainers.losses"),
        ("rl_consistency/rollout/a.py", "import wandb"),
        ("rl_consistency/parity/a.py", "from trl import GRPOTrainer"),
        ("rl_consistency/parity/a.py", "from rl_consistency.verify.claims import Claim"),
        ("rl_consistency/models/a.py", "from .patch import patch"),
        ("trainers/a.py", "from rl_consistency import patch"),
        ("trainers/a.py", "from rl_consistency.cli.main import main"),
        ("rl_consistency/cli/a.py", "from benchmarks.timing import Race"),
    ],
)
def test_an_arrow_upward_is_found(path, source):
    assert arrows_upward(PurePosixPath(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "kernels/linear/op.py",
            "import math\nimport torch\nfrom rl_consistency.kernels.matmul.op import matmul",
        ),
        ("rl_consistency/rollout/a.py", "import numpy\nfrom rl_consistency import kernels, models"),
        (
            "trainers/a.py",
            "import wandb\nfrom rl_consistency.trainers.data.examples import Example",
        ),
        ("benchmarks/a.py", "from rl_consistency.cli.main import main"),
    ],
)
def test_an_arrow_downward_is_not(path, source):
    assert arrows_upward(PurePosixPath(path), source) == []


def test_a_circle_is_found():
    sources = {
        PurePosixPath("kernels/linear/op.py"): "from rl_consistency.kernels.matmul import op",
        PurePosixPath("kernels/matmul/op.py"): "def f():\n import rl_consistency.kernels.linear.op",
        PurePosixPath("kernels/linear/triton.py"): "import rl_consistency.kernels.linear.op",
    }
    found = circle(arrows(sources))
    assert found and {f"{PACKAGE}.kernels.linear.op", f"{PACKAGE}.kernels.matmul.op"} == set(found)
    assert circle(arrows(dict(list(sources.items())[:1]))) is None


def test_a_circle_of_folders_is_found():
    glu, norm = f"{PACKAGE}.kernels.pointwise", f"{PACKAGE}.kernels.rms_norm"
    graph = {f"{glu}.x": {f"{norm}.x"}, f"{norm}.y": {f"{glu}.y"}}
    assert circle(graph) is None and circle(kernel_folder_arrows(graph))


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("product.py", "@triton.jit\ndef kernel(): ...", "names no device"),
        (
            "schedules.py",
            "from rl_consistency.kernels.matmul.product_triton import f",
            "is a leaf",
        ),
        ("schedules.py", "from rl_consistency.kernels.matmul import product_triton", "is a leaf"),
        ("op.py", "x = 1", "states no ORDER"),
        ("other.py", "", "op.py is missing"),
    ],
)
def test_a_fault_of_grammar_is_found(name, source, fault):
    sources = {PurePosixPath("op.py"): "ORDER = 1"} if "missing" not in fault else {}
    sources[PurePosixPath(name)] = source
    found = grammar_faults("matmul", sources)
    assert len(found) >= 1 and all(fault in line for line in found)


@pytest.mark.parametrize("folder", ["kernels", "trainers"])
def test_the_linked_folders_are_namespace_packages(folder):
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_importing_the_package_does_nothing_heavy():
    heavy = ["torch", "transformers", "triton", "accelerate", "numpy", "matplotlib", "rich"]
    code = (
        "import sys\nbefore = set(sys.modules)\nimport rl_consistency\n"
        f"print(sorted((set(sys.modules) - before) & {set(heavy)!r}))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def anchors(path):
    """The names that links give to the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    """The links of a Markdown file to files or headings that do not exist."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]+))?\)", path.read_text("utf-8"))
    for target, anchor in links:
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{target}#{anchor}"


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".md"], ids=str)
def test_links_of_documents_lead_somewhere(path):
    assert not list(broken_links(ROOT / path))


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    file = tmp_path / "a.md"
    file.write_text("# Two words\n[x](a.md#two-words) [y](#two-words) [z](b.md) [w](a.md#three)\n")
    assert list(broken_links(file)) == ["b.md#", "a.md#three"]
