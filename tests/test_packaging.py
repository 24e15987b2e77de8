import configparser
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rl_consistency

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    *("kernels", "numerics", "files", "models", "rollout", "parity", "distributed"),
    *("integrations", "trainers", "cases", "verify", "tuning", "cli"),
)


@pytest.fixture(scope="module")
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that no build folder is left in the tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tree = [
        "setup.cfg",
        "pyproject.toml",
        "LICENSE",
        "rl_consistency",
        "kernels",
        "trainers",
        "recipes",
    ]
    tree += ["README.md"] if (ROOT / "README.md").exists() else []
    # cp -P keeps the symlinks as links.
    subprocess.run(["cp", "-RP", *(str(ROOT / name) for name in tree), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = target.glob("*.whl")
    return file


@pytest.mark.parametrize("folder", ["kernels", "trainers", "recipes"])
def test_the_links_are_relative(folder):
    link = ROOT / "rl_consistency" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


def test_the_version_is_stated_once(setup_cfg):
    assert setup_cfg["metadata"]["version"] == rl_consistency.__version__


def pins_of(name):
    lines = (ROOT / name).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    (exact,) = {spec.operator for pin in pins for spec in pin.specifier}
    assert exact == "=="
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def requirements_of(setup_cfg, *extras):
    lists = [setup_cfg["options"]["install_requires"]]
    lists += [setup_cfg["options.extras_require"][name] for name in extras]
    return [Requirement(line) for text in lists for line in text.split("\n") if line]


def test_every_requirement_of_a_user_ends_where_trials_ended(setup_cfg):
    extras = {*setup_cfg["options.extras_require"]} - {"dev"}
    for requirement in requirements_of(setup_cfg, *extras):
        assert {"<", ">="} == {s.operator for s in requirement.specifier}, str(requirement)


@pytest.mark.parametrize("lock", ["constraints-cpu.txt", "constraints-gpu.txt"])
def test_a_lock_holds_versions_that_every_requirement_allows(setup_cfg, lock):
    pins = pins_of(lock)
    cpu = lock == "constraints-cpu.txt"
    for requirement in requirements_of(setup_cfg, *(("dev", "wandb", "trl") if cpu else ())):
        name = canonicalize_name(requirement.name)
        if cpu or name in pins:
            assert requirement.specifier.contains(pins[name]), str(requirement)
    assert {"torch", "triton", "transformers", "accelerate"} <= pins.keys()


def test_the_locks_are_those_of_ci_and_of_the_recorded_gpu_runs():
    makefile = (ROOT / "Makefile").read_text()
    assert "CONSTRAINTS := constraints-cpu.txt\n" in makefile
    assert len(re.findall(r"\(PIP\).* -c \$\(CONSTRAINTS\)", makefile)) == makefile.count("$(PIP)")
    text = (ROOT / "benchmarks" / "results" / "h200_recipes.json").read_text()
    for name, version in pins_of("constraints-gpu.txt").items():
        assert f'"{name}": "{version}' in text, name


def test_ci_runs_what_a_developer_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text and " lint test\n" in text


def test_every_requirement_is_run_at_its_floor_or_named_as_kept():
    tool = runpy.run_path(str(ROOT / "tools" / "oldest_versions.py"))
    floors = tool["oldest"]()
    assert {"transformers", "tokenizers", "safetensors"} <= floors.keys()
    assert set(tool["KEPT"]) == {"torch", "triton"} and set(tool["KEPT"]) < floors.keys()
    assert all(re.fullmatch(r"\d+(\.\d+)+", floor) for floor in floors.values())


def test_a_requirement_without_a_floor_is_an_error(tmp_path):
    """Negative control: none is left out of `make oldest` unseen."""
    oldest = runpy.run_path(str(ROOT / "tools" / "oldest_versions.py"))["oldest"]
    oldest.__globals__["ROOT"] = tmp_path
    (tmp_path / "setup.cfg").write_text(
        "[options]\ninstall_requires =\n    numpy>=1.26\n    rich\n"
    )
    with pytest.raises(ValueError, match="element #1 has length 1"):
        oldest()


def test_the_wheel_holds_every_file_of_every_room_once(wheel):
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    rooms = {room: (ROOT / "rl_consistency" / room).resolve() for room in ROOMS}
    expected = ["rl_consistency/__init__.py", "rl_consistency/__main__.py"] + [
        f"rl_consistency/{room}/{file.relative_to(folder)}"
        for room, folder in rooms.items()
        for file in folder.glob("**/*.py")
    ]
    assert sorted(packed) == sorted(expected)


def test_the_wheel_brings_every_recipe(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".yaml")}
    recipes = ROOT / "recipes"
    shipped = {
        f"rl_consistency/recipes/{file.relative_to(recipes)}" for file in recipes.rglob("*.yaml")
    }
    assert packed == shipped and shipped


@pytest.mark.parametrize("file", ["kernels/core/shipped_findings.json", "verify/presets.json"])
def test_the_wheel_brings_its_data(wheel, file):
    packed = zipfile.ZipFile(wheel).read(f"rl_consistency/{file}")
    assert packed == (ROOT / "rl_consistency" / file).read_bytes()


def test_the_wheel_declares_its_command_and_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "rl-consistency = rl_consistency.cli.main:main" in entry_points
    assert "License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()
