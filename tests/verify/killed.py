"""A program that kills itself, and the processes that it began and that must end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def is_running(pid):
    """Whether a process is there and not just waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_behind(program, folder):
    """Processes of a program that outlive it, which are ended. It prints two and kills itself."""
    (folder / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"cwd": folder, "env": environment | {"TMPDIR": str(folder)}, "timeout": 300}
    # To a file: a pipe would stay open for as long as a process that was left behind.
    with (folder / "pids").open("w") as file:
        killed = subprocess.run([sys.executable, "program.py"], stdout=file, **options)
    assert killed.returncode == -signal.SIGKILL
    children = (folder / "pids").read_text().split()
    assert len(children) == 2
    end = time.monotonic() + 20
    while any(map(is_running, children)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in children if is_running(pid)]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    return left
