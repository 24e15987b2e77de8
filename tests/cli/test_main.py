"""The command line as a whole: dispatch, exit statuses, messages."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rl_consistency
from rl_consistency.cli import main as cli
from rl_consistency.cli.main import COMMANDS, main
from rl_consistency.numerics.errors import ConsistencyError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Stands in for `cli.verify`; set `.action` to what it should do."""
    module = ModuleType("rl_consistency.cli.verify")
    module.add_arguments = lambda parser: parser.add_argument("--level", type=int, default=0)
    module.run = lambda args: module.action(args)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_status_of_a_command_is_returned(command):
    command.action = lambda args: args.level
    assert main(["verify", "--level", "3"]) == 3
    assert main(["verify"]) == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConsistencyError("3 tokens differ"), 1),
        (ValueError("unknown preset"), 2),
        (TypeError("fp8"), 2),
        (FileNotFoundError("no such file"), 2),
    ],
)
def test_an_expected_error_is_one_message_and_a_status(command, capsys, error, status):
    def fail(args):
        raise error

    command.action = fail
    assert main(["verify"]) == status
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""


def test_an_interrupt_has_its_own_status(command, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    command.action = interrupt
    assert main(["verify"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("bug", [KeyError("bug"), RecursionError("deep"), SystemExit(0)])
def test_a_bug_shows_its_traceback_and_has_a_status_of_its_own(command, capsys, bug):
    def fail(args):
        raise bug

    command.action = fail
    assert main(["verify"]) == 3
    shown = capsys.readouterr().err
    assert "Traceback" in shown and type(bug).__name__ in shown
    assert shown.splitlines()[-1].startswith("error: this is a mistake of rl-consistency")


@pytest.mark.parametrize("status", [0, 1])
def test_an_exit_that_is_let_through_passes_for_an_end_of_ours(command, monkeypatch, status):
    """Negative control."""
    command.action = lambda args: sys.exit(status)
    monkeypatch.setattr(cli, "_run", lambda args: args.run(args))
    with pytest.raises(SystemExit) as exit_:
        main(["verify"])
    assert exit_.value.code == status


@pytest.mark.parametrize(
    "write",
    [
        "print('x' * 100_000, flush=True)",
        "print('x')",  # stays in the buffer until the end
        "Console().print('x')",  # rich makes an exit of it
        "print('x' * 100_000, file=sys.stderr)",
        "raise ValueError('x')",  # whose message is what cannot be written
    ],
)
def test_a_closed_pipe_is_quiet(tmp_path, write):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom types import ModuleType\nfrom rich.console import Console\n"
        "from rl_consistency.cli.main import main\n"
        "verify = ModuleType('verify')\nverify.add_arguments = lambda parser: None\n"
        f"def run(args):\n    {write}\n    return 0\n"
        "verify.run = run\nsys.modules['rl_consistency.cli.verify'] = verify\n"
        "sys.exit(main(['verify']))\n"
    )
    both, other = ("stderr" in write or "raise" in write), tmp_path / "other"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed, other.open("wb") as file:
        streams = {"stdout": closed, "stderr": closed if both else file}
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, script], env=environment, check=False, **streams)
    assert done.returncode == 141
    assert other.read_bytes() == b""


def test_another_broken_pipe_is_an_error(command, capsys):
    def fail(args):
        raise BrokenPipeError(32, "the pipe of a tracker")

    command.action = fail
    assert main(["verify"]) == 2
    assert "the pipe of a tracker" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["verify", "--unknown"]])
def test_a_wrong_call_is_bad_input(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: rl-consistency" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert COMMANDS[name] in " ".join(capsys.readouterr().out.split())


def test_a_missing_run_directory_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert str(tmp_path / "absent") in capsys.readouterr().err


def test_the_module_is_the_command_and_loads_nothing_heavy():
    code = (
        "import sys\nsys.argv[1:] = ['--help']\n"
        "from rl_consistency.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    shown = subprocess.run(
        [sys.executable, "-m", "rl_consistency", "--version"], capture_output=True, text=True
    )
    assert shown.stdout == f"rl-consistency {rl_consistency.__version__}\n"


def test_an_output_without_room_is_bad_input_in_one_line():
    command = [sys.executable, "-m", "rl_consistency", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: standard output cannot be written to: No space left on device\n"
