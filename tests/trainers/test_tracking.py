import io
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from rl_consistency.trainers import tracking
from rl_consistency.trainers.tracking import (
    ConsoleTable,
    MetricsFile,
    TrackerSet,
    WandbTracker,
    read_metrics,
)

STEP = {
    "reward/mean": 0.25,
    "loss": -0.01234,
    "tokens_per_second": 12345.6,
    "consistency/mismatched_tokens": 0,
}


def write(path, steps, **options):
    tracker = MetricsFile(path, **options)
    for step in steps:
        tracker.log(step, {"loss": step / 8})
    tracker.close()


def steps_of(path):
    return [row["step"] for row in read_metrics(path)]


def test_each_step_is_one_line_on_disk_before_log_returns(tmp_path):
    tracker = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    tracker.log(1, STEP | {"consistency/parameter_digest": "ab", "passed": True})
    tracker.log(2, STEP)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0] == {
        "step": 1,
        **STEP,
        "consistency/parameter_digest": "ab",
        "passed": True,
    }
    tracker.close()


def test_nonfinite_metrics_stay_readable_json_and_read_back(tmp_path):
    tracker = MetricsFile(tmp_path / "m.jsonl")
    tracker.log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    tracker.close()
    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    row = read_metrics(tmp_path / "m.jsonl")[0]
    assert math.isnan(row["a"]) and row["b"] == -math.inf and row["c"] == 1.0


@pytest.mark.parametrize(
    ("step", "metrics", "error", "message"),
    [
        (1, STEP, ValueError, "steps must ascend"),
        (2, {"step": 2}, ValueError, "must not hold 'step'"),
        (2, {"loss": torch.ones(())}, TypeError, r"'loss'.*\.item\(\)"),
        (2, {"loss": None}, TypeError, "NoneType"),
    ],
)
def test_what_is_not_a_next_step_is_refused_and_not_written(
    tmp_path, step, metrics, error, message
):
    tracker = MetricsFile(tmp_path / "m.jsonl")
    tracker.log(1, STEP)
    with pytest.raises(error, match=message):
        tracker.log(step, metrics)
    tracker.close()
    assert steps_of(tmp_path / "m.jsonl") == [1]


def test_a_new_run_does_not_write_into_an_old_file(tmp_path):
    write(tmp_path / "m.jsonl", [1])
    with pytest.raises(FileExistsError, match="resume that run"):
        MetricsFile(tmp_path / "m.jsonl")


def test_resuming_cuts_later_steps_and_an_unfinished_line(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 8))
    with open(path, "a") as stream:
        stream.write('{"step": 8, "lo')
    write(path, [6, 7], resume_from=5)
    assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("resume_from", [2, 5])
def test_an_unfinished_line_goes_even_when_no_later_step_does(tmp_path, resume_from):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 3, "lo')
    write(path, [], resume_from=resume_from)
    assert path.read_bytes() == before


def test_resuming_keeps_bytes_of_earlier_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    before = path.read_bytes()
    write(path, [], resume_from=3)
    assert path.read_bytes() == before
    write(path, [], resume_from=0)
    assert path.read_bytes() == b""


def test_resuming_does_not_allow_a_step_twice(tmp_path):
    write(tmp_path / "m.jsonl", [1, 2])
    tracker = MetricsFile(tmp_path / "m.jsonl", resume_from=2)
    with pytest.raises(ValueError, match="steps must ascend"):
        tracker.log(2, STEP)
    tracker.close()


def test_resuming_without_a_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics there"):
        MetricsFile(tmp_path / "m.jsonl", resume_from=3)


@pytest.mark.parametrize(
    "line", [b"not json\n", b"[1]\n", b'{"loss": 1}\n', b'{"step": 1}\n', b'{"step": "3"}\n']
)
def test_a_damaged_line_in_the_middle_is_named_not_dropped(tmp_path, line):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes() + line + b'{"step": 9}\n')
    for read in (read_metrics, lambda p: MetricsFile(p, resume_from=9)):
        with pytest.raises(ValueError, match=r"m\.jsonl, line 3"):
            read(path)
    assert path.read_bytes().endswith(b'{"step": 9}\n')


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"step": 3}'])
def test_reading_names_an_unfinished_last_line(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(ValueError, match="line 3"):
        read_metrics(path)


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    tracker = MetricsFile(tmp_path / "m.jsonl")
    tracker.log(1, STEP)

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tracking.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            tracker.log(2, STEP)
    assert steps_of(tmp_path / "m.jsonl") == [1]
    tracker.log(2, STEP)
    tracker.close()
    assert steps_of(tmp_path / "m.jsonl") == [1, 2]


def test_lines_survive_kill_9(tmp_path):
    program = (
        "import os, sys\n"
        "from rl_consistency.trainers.tracking import MetricsFile\n"
        "tracker = MetricsFile(sys.argv[1])\n"
        "for step in range(1, 4):\n"
        "    tracker.log(step, {'loss': 0.5})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "m.jsonl"
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert steps_of(path) == [1, 2, 3]


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)


def test_a_pipe_gets_plain_lines_under_one_header():
    out = console(terminal=False)
    table = ConsoleTable(40, console=out)
    table.log(1, STEP)
    table.log(2, STEP | {"stock/mismatch_fraction": 0.4567, "consistency/mismatched_tokens": 1234})
    table.log(3, {"consistency/gradient_check/passed": 0, "loss": math.nan})
    table.close()
    header, *lines = out.file.getvalue().splitlines()
    assert header.split()[:2] == ["step", "reward"] and len(lines) == 3
    assert lines[0].split() == ["1/40", "0.250", "-", "-0.0123", "12,346", "0", "-", "-"]
    assert "1,234" in lines[1] and "45.7%" in lines[1]
    assert "FAILED" in lines[2] and "nan" in lines[2]
    assert len({len(line) for line in [header, *lines]}) == 1
    assert "\x1b" not in out.file.getvalue()


def test_a_terminal_gets_a_live_table_of_the_last_steps():
    out = console(terminal=True)
    table = ConsoleTable(console=out, rows=2)
    for step in (101, 102, 103):
        table.log(step, STEP | {"consistency/gradient_check/passed": True})
    table.close()
    last_frame = out.file.getvalue().rsplit("step", 1)[1]
    assert "103" in last_frame and "102" in last_frame and "101" not in last_frame
    assert "passed" in last_frame
    table.close()


class Recorder:
    def __init__(self, fails=False):
        self.seen, self.closed, self.fails = [], 0, fails

    def log(self, step, metrics):
        self.seen.append((step, metrics))

    def close(self):
        self.closed += 1
        if self.fails:
            raise OSError("no")


def test_a_tracker_set_logs_to_all_and_closes_all_even_if_one_fails():
    a, b, c = Recorder(), Recorder(fails=True), Recorder()
    with pytest.raises(OSError, match="no"), TrackerSet([a, b, c]) as trackers:
        trackers.log(1, STEP)
    assert [tracker.seen for tracker in (a, b, c)] == [[(1, STEP)]] * 3
    assert [tracker.closed for tracker in (a, b, c)] == [1, 1, 1]


def test_missing_wandb_is_an_error_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"rl-consistency\[wandb\].*tracking\.wandb"):
        WandbTracker("project", directory=tmp_path)


def test_an_unknown_wandb_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'offline' or 'online'"):
        WandbTracker("project", directory=tmp_path, mode="shared")


def test_wandb_offline_needs_no_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = WandbTracker("project", directory=tmp_path / "out", name="n", config={"seed": 1})
    tracker.log(1, STEP | {"consistency/parameter_digest": "ab"})
    tracker.close()
    files = [name for _, _, names in os.walk(tmp_path / "out") for name in names]
    assert any(name.endswith(".wandb") for name in files)
