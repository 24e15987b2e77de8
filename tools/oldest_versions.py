"""Runs a recipe and some tests with the oldest versions that setup.cfg allows.

Usage: oldest_versions.py (needs a package index). pip resolves the versions, so floors that
contradict each other or a dependency of theirs fail here. Python and torch are those of the
environment it runs in, and so is what an overlay in front of it does not hold. The oldest Triton,
which belongs to another torch, only compiles the kernels.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "grpo_arithmetic_tiny_cpu.yaml"
KEPT = ("torch", "triton")
"""Not in the overlay of the recipe. The recorded GPU runs used torch 2.11 and triton 3.6."""
KERNELS = "tests/kernels/test_compiles_for_sm90.py"
"""Newer versions of Triton take arguments of device functions that 3.6 does not."""
TESTS = ("tests/trainers/config/test_config.py", "tests/trainers/test_policy.py")
"""Tests that ask most of the packages: pydantic's errors, transformers' loading."""
ALONE = ("accelerate",)
"""Installed without dependencies: theirs is torch."""

CHECK = """
import sys
from importlib.metadata import version
from packaging.version import Version
wrong = [f"{r}: {version(r.split('==')[0])} is imported" for r in sys.argv[1:]
         if Version(version(r.split("==")[0])) != Version(r.split("==")[1])]
sys.exit("; ".join(wrong) or None)
"""


def oldest() -> dict[str, str]:
    """Package -> the oldest version that setup.cfg allows, of all that a run needs."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].split()
    return dict(line.partition(";")[0].partition(",")[0].split(">=") for line in lines)


def main() -> int:
    pins = [f"{name}=={floor}" for name, floor in oldest().items() if name not in KEPT]
    alone = [pin for pin in pins if pin.startswith(ALONE)]
    resolved = [pin for pin in pins if pin not in alone]
    with tempfile.TemporaryDirectory(prefix="oldest_versions_") as folder:
        overlay = str(Path(folder, "packages"))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        pip += ["--disable-pip-version-check", "--target", overlay]
        for given in (resolved, ["--no-deps", *alone]):
            subprocess.run([*pip, *given], check=True)
        # In front of the environment's own packages, which hold torch.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([overlay, str(ROOT)])}
        subprocess.run([sys.executable, "-c", CHECK, *pins], env=environment, check=True)
        changes = ["training.steps=2", "warm_start.steps=2", "data.task.eval_size=4"]
        changes += ["optimizer.warmup_steps=0", f"run.output_dir={folder}/run"]
        options = [part for change in changes for part in ("--set", change)]
        train = [sys.executable, "-m", "rl_consistency", "train", str(RECIPE), *options]
        subprocess.run(train, env=environment, check=True)
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        subprocess.run([*tests, "-W", "ignore"], cwd=ROOT, env=environment, check=True)
        triton = str(Path(folder, "triton"))
        pin = f"triton=={oldest()['triton']}.0"
        subprocess.run([*pip[:-1], triton, "--no-deps", pin], check=True)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([triton, str(ROOT)])}
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", KERNELS]
        subprocess.run(tests, cwd=ROOT, env=environment, check=True)
    print(f"oldest versions: two steps and {len(TESTS)} groups of tests ran with {', '.join(pins)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
