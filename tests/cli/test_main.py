"""The command line as a whole: dispatch, exit statuses, messages."""

import subprocess
import sys
from types import ModuleType

import pytest

import rl_consistency
from rl_consistency.cli.main import COMMANDS, main
from rl_consistency.numerics.errors import ConsistencyError


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


def test_a_bug_is_not_hidden(command):
    def bug(args):
        raise KeyError("bug")

    command.action = bug
    with pytest.raises(KeyError):
        main(["verify"])


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
