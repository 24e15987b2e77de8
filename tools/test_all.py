"""Runs every test that needs no GPU, then `oldest_versions.py`, and records the result as data.

Usage: test_all.py [WORKERS]. benchmarks/results/cpu_test_all.json gets the commit, the versions,
the counts of tests and the seconds. A tree with uncommitted changes is tested and not recorded.
Exit status 1 where a test or the oldest versions failed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "cpu_test_all.json"
PACKAGES = ("torch", "triton", "transformers")


def counts(report: Path) -> dict[str, int]:
    """Passed, failed and skipped tests of pytest's XML; a collection error has failed."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (int(suite.get(name, 0)) for name in names)
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    workers = arguments[0] if arguments else "2"
    began, changed = time.monotonic(), git("status", "--porcelain").strip()
    with tempfile.TemporaryDirectory(prefix="test_all_") as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "worksteal"]
        pytest += ["-m", "not gpu", "--ignore", "tests/gpu", f"--junitxml={report}"]
        status = subprocess.run(pytest, cwd=ROOT).returncode
        if not report.exists():
            return status
        found: Mapping[str, Any] = counts(report)
    oldest = subprocess.run([sys.executable, "tools/oldest_versions.py"], cwd=ROOT).returncode
    record = {
        "command": "make test-all",
        "commit": git("rev-parse", "HEAD").strip(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "workers": int(workers),
        **found,
        "oldest_versions": "failed" if oldest else "passed",
        "seconds": round(time.monotonic() - began),
    }
    if changed:
        print(f"not recorded, since the tree has changes:\n{changed}", file=sys.stderr)
    else:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 1 if status or oldest else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
