"""The command line as a whole: dispatch, exit statuses, messages."""

import io
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

import rl_consistency
from rl_consistency.cli import main as cli
from rl_consistency.cli.arguments import COMMANDS
from rl_consistency.cli.main import main
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.trainers.run_directory.directory import full_disk_explained

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Stands in for `cli.verify`; set `.action` to what it should do."""
    module = ModuleType("rl_consistency.cli.verify")
    module.run = lambda args: module.action(args)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConsistencyError("3 tokens differ"), 1),
        (ValueError("unknown preset"), 2),
        (TypeError("fp8"), 2),
        (FileNotFoundError("no such file"), 2),
        (TimeoutError(), 2),
    ],
)
def test_an_expected_error_is_one_message_and_a_status(command, capsys, error, status):
    def fail(args):
        raise error

    command.action = fail
    assert main(["verify"]) == status
    captured = capsys.readouterr()
    assert captured.err == f"error: {str(error) or 'TimeoutError'}\n"
    assert captured.out == ""


@pytest.mark.parametrize("place", ["command.action", "cli._parser"])
def test_an_interrupt_has_its_own_status(command, capsys, monkeypatch, place):
    def interrupt(*_):
        raise KeyboardInterrupt

    owner, name = place.split(".")
    monkeypatch.setattr({"command": command, "cli": cli}[owner], name, interrupt, raising=False)
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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModuleNotFoundError("No module named 'triton.language'", name="triton.language"), 2),
        (ImportError("cannot import name 'X' from 'transformers'", name="transformers"), 2),
        (ModuleNotFoundError("No module named 'rl_consistency.x'", name="rl_consistency.x"), 3),
        (ImportError("of no module"), 3),
    ],
)
def test_a_missing_package_is_no_mistake_of_ours(command, capsys, error, status):
    def fail(args):
        raise error

    command.action = fail
    assert main(["verify"]) == status
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {error}: ") == (status == 2)
    assert ("pip install" in shown) == (status == 2)


@pytest.mark.parametrize("status", [0, 1])
def test_an_exit_that_is_let_through_passes_for_an_end_of_ours(command, monkeypatch, status):
    """Negative control."""
    command.action = lambda args: sys.exit(status)
    monkeypatch.setattr(cli, "_run", command.run)
    with pytest.raises(SystemExit) as exit_:
        main(["verify"])
    assert exit_.value.code == status


@pytest.fixture
def script(tmp_path):
    """Runs the command in a process of its own, in which `verify` does what is given."""

    def run(body, **options):
        file = tmp_path / "script.py"
        file.write_text(
            "import os, signal, sys, time\nfrom types import ModuleType\n"
            "from rich.console import Console\nfrom rl_consistency.cli.main import main\n"
            "verify = ModuleType('verify')\n"
            f"def run(args):\n    {body}\n    return 0\n"
            "verify.run = run\nsys.modules['rl_consistency.cli.verify'] = verify\n"
            "sys.exit(main(['verify']))\n"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.run([sys.executable, file], env=environment, check=False, **streams)

    return run


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
def test_a_closed_pipe_is_quiet(tmp_path, script, write):
    both, other = ("stderr" in write or "raise" in write), tmp_path / "other"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed, other.open("wb") as file:
        streams = {"stdout": closed, "stderr": closed if both else file}
        done = script(write, **streams)
    assert done.returncode == 141
    assert other.read_bytes() == b""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["verify", "--unknown"],
        ["--vers"],
        ["train", "recipe", "--over"],
        ["train", "recipe", "--resume", "--overwrite"],
    ],
)
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
    assert COMMANDS[name].help in " ".join(capsys.readouterr().out.split())


def test_help_of_no_command_loads_anything_heavy():
    code = (
        "import sys\nfrom rl_consistency.cli.arguments import COMMANDS\n"
        "from rl_consistency.cli.main import main\n"
        "for command in [[], *([name] for name in COMMANDS)]:\n"
        "    try:\n        main([*command, '--help'])\n    except SystemExit:\n        pass\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & {*sys.modules}\n"
        "    assert not heavy, (command, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_is_the_command():
    shown = subprocess.run(
        [sys.executable, "-m", "rl_consistency", "--version"], capture_output=True, text=True
    )
    assert shown.stdout == f"rl-consistency {rl_consistency.__version__}\n"


@pytest.mark.parametrize("write", ["print('x', flush=True)", "print('x')", "Console().print('x')"])
def test_an_output_without_room_is_bad_input_in_one_line(script, write):
    with open("/dev/full", "w") as full:
        done = script(write, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"error: standard output cannot be written to: No space left on device\n"


class Full(io.StringIO):
    def write(self, text):
        if text:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("stream", "blamed"),
    [(Full(), "free some space"), (io.TextIOWrapper(io.BytesIO(), "ascii"), "can't encode")],
)
def test_an_output_as_it_is_fails_for_the_disk_of_the_run_or_for_a_letter(
    command, monkeypatch, capsys, tmp_path, stream, blamed
):
    """Negative control."""

    def write(args):
        with full_disk_explained(tmp_path):
            print("5 é")

    command.action = write
    monkeypatch.setattr(cli, "_Output", lambda stream: stream)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["verify"]) == 2
    assert blamed in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "status"), [("raise ValueError('x')", 2), ("raise KeyError('x')", 3)]
)
def test_errors_that_nobody_can_be_told_of_keep_their_status(script, body, status):
    with open("/dev/full", "w") as full:
        assert script(body, stderr=full).returncode == status


@pytest.mark.parametrize("write", ["print('5 é')", "Console().print('5 é')", "print('5 \\udcff')"])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_the_output_cannot_encode_is_escaped(script, write, encoding):
    done = script(write, env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"5 ")


END = "os.kill(os.getpid(), signal.{})\n    time.sleep(0.01)\n    print('went on')"


@pytest.mark.parametrize(("signal_", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_that_ends_a_run_has_its_own_status(script, signal_, status):
    done = script(END.format(signal_))
    assert (done.returncode, done.stdout) == (status, b"")
    assert done.stderr == f"error: ended by {signal_}\n".encode()


def test_a_signal_that_nobody_catches_lets_nothing_be_told(script):
    """Negative control."""
    uncaught = "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    "
    told = "try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n    finally: print('told')"
    assert script(told).stdout == b"told\n"
    done = script(uncaught + told)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, b"", b"")


def test_a_signal_that_was_ignored_stays_ignored(script):
    done = script(
        END.format("SIGHUP"), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert (done.returncode, done.stdout) == (0, b"went on\n")


def test_a_process_that_a_command_forked_dies_of_the_signal(script):
    end = "if not (child := os.fork()): os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n    "
    done = script(f"{end}print(os.waitpid(child, 0)[1])")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"15\n", b"")


def test_signals_are_left_as_they_were(command):
    command.action = lambda args: 0
    main(["verify"])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["verify"]).result() == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
