import io
import json
import math
import os
import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from rl_consistency.trainers.metric_reference import references
from rl_consistency.trainers.tracking import ConsoleTable, TrackerSet, WandbTracker, check_wandb
from tests.trainers.wandb_file import records

STEP = {
    "reward/mean": 0.25,
    "loss": -0.01234,
    "tokens_per_second": 12345.6,
    "consistency/mismatched_tokens": 0,
}


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

    def close(self, *, failed=False):
        self.closed += 1
        self.failed = failed
        if self.fails:
            raise OSError("no")


def test_a_tracker_set_logs_to_all_and_closes_all_even_if_one_fails():
    a, b, c = Recorder(), Recorder(fails=True), Recorder()
    with pytest.raises(OSError, match="no"), TrackerSet([a, b, c]) as trackers:
        trackers.log(1, STEP)
    assert [tracker.seen for tracker in (a, b, c)] == [[(1, STEP)]] * 3
    assert [tracker.closed for tracker in (a, b, c)] == [1, 1, 1]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_trackers_learn_whether_the_run_failed(error):
    recorder = Recorder()
    with pytest.raises(error) if error else nullcontext(), TrackerSet([recorder]):
        if error is not None:
            raise error
    assert recorder.closed == 1 and recorder.failed == (error is not None)


@pytest.mark.parametrize(("failed", "status"), [(False, 0), (True, 1)])
def test_wandb_is_told_the_status_of_a_run(tmp_path, monkeypatch, failed, status):
    wandb = pytest.importorskip("wandb", reason="wandb is an optional extra")
    tracker, statuses = WandbTracker("project", directory=tmp_path), []
    finish = wandb.Run.finish

    def recorded(run, exit_code=None, **options):
        statuses.append(exit_code)
        return finish(run, exit_code, **options)

    monkeypatch.setattr(wandb.Run, "finish", recorded)
    tracker.close(failed=failed)
    assert statuses == [status]


def test_missing_wandb_is_an_error_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"rl-consistency\[wandb\].*tracking\.wandb"):
        WandbTracker("project", directory=tmp_path)


def test_wandb_online_without_a_key_is_refused_with_its_remedy(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    check_wandb("offline")
    with pytest.raises(ValueError, match=r"online: .*No API key.*WANDB_API_KEY.*offline"):
        check_wandb("online")


def test_an_unknown_wandb_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'offline' or 'online'"):
        WandbTracker("project", directory=tmp_path, mode="shared")


def test_wandb_has_every_metric_and_the_value_that_stands_for_the_run(tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    tracker = WandbTracker("project", directory=tmp_path)
    for step, differing in ((1, 3), (2, 0)):
        tracker.log(step, {"consistency/mismatched_tokens": differing, "reward/toy": 0.5 * step})
    tracker.close()
    found = records(tmp_path)
    metrics = [record.metric for record in found if record.HasField("metric")]
    kinds = ("last", "max", "min", "mean")
    defined = {
        metric.name or metric.glob_name: {k for k in kinds if getattr(metric.summary, k)}
        for metric in metrics
    }
    assert {name: {described.standing} for name, described in references()}.items() <= (
        defined.items()
    )
    rows = [record.history for record in found if record.HasField("history")]
    logged = [{item.nested_key[0]: json.loads(item.value_json) for item in h.item} for h in rows]
    assert [row["consistency/mismatched_tokens"] for row in logged] == [3, 0]
    assert [row["reward/toy"] for row in logged] == [0.5, 1.0]
    shown = {
        item.nested_key[0]: json.loads(item.value_json)
        for record in found
        if record.HasField("summary")
        for item in record.summary.update
        if item.nested_key
    }
    assert shown["consistency/mismatched_tokens"] == {"max": 3}
    assert shown["reward/toy"] == {"last": 1.0}


def test_wandb_offline_needs_no_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = WandbTracker("project", directory=tmp_path / "out", name="n", config={"seed": 1})
    tracker.log(1, STEP | {"consistency/gradient_digest": "ab"})
    tracker.close()
    files = [name for _, _, names in os.walk(tmp_path / "out") for name in names]
    assert any(name.endswith(".wandb") for name in files)
