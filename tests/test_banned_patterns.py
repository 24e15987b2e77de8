import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "banned_patterns.py"


def load():
    spec = importlib.util.spec_from_file_location("banned_patterns", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BANNED = load()

MUTANTS = {
    "tl.atomic_add(pointer, value)": "tl.atomic_add",
    "language.atomic_add(pointer, value)": "tl.atomic_add",
    "from triton.language import atomic_add": "tl.atomic_add",
    "tl.atomic_add(pointer, 1.0)": "tl.atomic_add",
    "slot = gl.atomic_add(counter, 1)": "tl.atomic_add",
    "tl.store(out + tl.atomic_add(counter, 1), v)": "tl.atomic_add",
    "if gl.atomic_add(counter, 1) < last:\n    f()": "tl.atomic_add",
    "first = gl.atomic_add(counter, 1) == 0 == x": "tl.atomic_add",
    "@triton.autotune(configs=[], key=[])\ndef f(): ...": "triton.autotune",
    "from triton import autotune": "triton.autotune",
    "try:\n    f()\nexcept Exception:\n    pass": "except Exception",
    "try:\n    f()\nexcept (ValueError, Exception) as e:\n    raise": "except Exception",
    "try:\n    f()\nexcept BaseException:\n    undo()": "except Exception",
    "try:\n    f()\nexcept BaseException as e:\n    raise KeyError from e": "except Exception",
    "try:\n    f()\nexcept Exception:\n    undo()\n    raise": "except Exception",
    "try:\n    f()\nexcept builtins.Exception:\n    raise": "except Exception",
    "try:\n    f()\nexcept:\n    pass": "except Exception",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "warn_only",
    "import kernels": "import kernels",
    "import kernels.linear as linear": "import kernels",
    "from kernels import linear": "from kernels",
    "from kernels.linear import canonical_linear": "from kernels",
    "torch.load('x.pt')": "torch.load",
    "torch.load('x.pt', weights_only=False)": "torch.load",
    "torch.load(\n    'x.pt',\n    map_location='cpu',\n)": "torch.load",
    "from torch import load": "torch.load",
}

ALLOWED = [
    "from rl_consistency.kernels import linear",
    "import rl_consistency.kernels.linear.op",
    "from .kernels import linear",
    "torch.load('x.pt', weights_only=True)",
    "'except Exception, tl.atomic_add, triton.autotune'",
    "gl.atomic_add(counter, 1, sem='acq_rel')",
    "if gl.atomic_add(counter, 1) == last - 1:\n    f()",
    "# import kernels",
    "try:\n    f()\nexcept (ValueError, OSError):\n    raise",
    "try:\n    f()\nexcept BaseException:\n    undo()\n    raise",
    "json.load(file)",
]


@pytest.mark.parametrize("source", MUTANTS)
def test_a_banned_construct_is_found(source):
    (finding,) = BANNED.findings_in(source, "f.py")
    assert finding.startswith("f.py:") and MUTANTS[source] in finding


@pytest.mark.parametrize("source", ALLOWED)
def test_an_allowed_construct_is_not(source):
    assert BANNED.findings_in(source, "f.py") == []


def test_the_repository_has_none():
    assert BANNED.main([]) == 0


def test_a_mutant_makes_the_command_fail_with_file_and_line(tmp_path):
    mutant = tmp_path / "package" / "mutant.py"
    mutant.parent.mkdir()
    mutant.write_text("import triton\n\n\nx = triton.autotune\n")
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout.startswith(f"{mutant}:4: triton.autotune")


def test_each_file_is_read_once_and_hidden_ones_are_not(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("")
    (tmp_path / "link").symlink_to("room")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.py").write_text("")
    assert list(BANNED.python_files(tmp_path)) == [tmp_path / "room" / "a.py"]


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        BANNED.main([str(tmp_path / "absent")])
