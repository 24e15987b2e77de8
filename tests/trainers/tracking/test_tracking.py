import errno
import io
import json
import math
import os
import re

import pytest
import torch
from accelerate import PartialState
from rich.console import Console

from rl_consistency.integrations.wandb_drift import ALERT
from rl_consistency.parity.drift_monitor import Mismatch
from rl_consistency.parity.histograms import drift_histograms
from rl_consistency.parity.metric_table import all_metrics
from rl_consistency.parity.replay import LOCALIZATION
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers import services
from rl_consistency.trainers.config.sections import WandbSection
from rl_consistency.trainers.hooks import Rollout
from rl_consistency.trainers.services import WandbTracker, check_wandb
from rl_consistency.trainers.tracking import ConsoleTable, TrackerSet
from tests.trainers.tracking.wandb_file import records

STEP = {
    "reward/mean": 0.25,
    "loss": -0.01234,
    "tokens_per_second": 12345.6,
    "consistency/mismatched_tokens": 0,
}


@pytest.fixture(autouse=True)
def _accelerate_has_begun():
    """As in a run; its trackers refuse to log before."""
    PartialState()


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)


def test_a_pipe_gets_plain_lines_under_one_header():
    out = console(terminal=False)
    table = ConsoleTable(40, console=out)
    table.log(1, STEP)
    table.log(2, STEP | {"stock/mismatch_fraction": 0.4567, "consistency/mismatched_tokens": 1234})
    table.log(3, {"consistency/gradient_check/passed": 0, "loss": math.nan})
    table.log(4, {"consistency/gradient_check/without_gradient": True})
    table.close()
    header, *lines = out.file.getvalue().splitlines()
    assert header.split()[:2] == ["step", "reward"] and len(lines) == 4
    assert lines[0].split() == ["1/40", "0.250", "-", "-0.0123", "12,346", "0", "-", "-"]
    assert "1,234" in lines[1] and "45.7%" in lines[1]
    assert "FAILED" in lines[2] and "nan" in lines[2] and "no gradient" in lines[3]
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


@pytest.mark.parametrize("rate, shown", [(12345.6, "12,346"), (0.0432, "0.043"), (3.14, "3.1")])
def test_eighty_columns_hold_every_word_of_the_live_table(rate, shown):
    out = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    table = ConsoleTable(1000, console=out)
    checked = {"consistency/gradient_check/without_gradient": True, "eval/reward": 0.125}
    drifted = {"stock/mismatch_fraction": 1.0, "consistency/mismatched_tokens": 1234567}
    table.log(1000, STEP | checked | drifted | {"tokens_per_second": rate})
    table.close()
    text = re.sub(r"\x1b\[\S*?[A-Za-z]", "", out.file.getvalue())
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    for word in ("1000/1000", "mismatched", "mismatch", "gradient", "1,234,567", shown):
        assert word in text.split(), word


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


OFFLINE, ONLINE = WandbSection(project="p"), WandbSection(project="p", mode="online")


@pytest.mark.parametrize(
    ("loss", "shown"), [(-1e-9, "0.0000"), (-0.0, "0.0000"), (-0.25, "-0.2500")]
)
def test_a_loss_that_rounds_to_zero_has_no_sign(capsys, loss, shown):
    ConsoleTable(1, console=Console(width=200)).log(1, {"loss": loss})
    assert capsys.readouterr().out.split("\n")[1].split()[3] == shown


def test_an_empty_variable_of_wandb_counts_as_not_set(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    warned = []
    monkeypatch.setenv("WANDB_MODE", "")
    assert check_wandb(OFFLINE, warned.append) is OFFLINE
    tracker = WandbTracker("p", directory=tmp_path, warn=warned.append)
    tracker.close()
    assert warned == []


def test_without_wandb_a_run_is_warned_once(monkeypatch):
    warned = []
    monkeypatch.setattr(services, "find_spec", lambda name: None)
    assert check_wandb(OFFLINE, warned.append) is None and check_wandb(None, warned.append) is None
    (line,) = warned
    assert "the run goes on" in line and "pip install 'rl-consistency[wandb]'" in line


def test_online_without_a_key_a_run_is_warned_once_with_the_remedy(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    warned = []
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert check_wandb(OFFLINE, warned.append) is OFFLINE and warned == []
    assert check_wandb(ONLINE, warned.append) is None
    (line,) = warned
    assert all(part in line for part in ("the run goes on", "WANDB_API_KEY", "offline"))


@pytest.mark.parametrize("online", [False, True])
def test_an_environment_that_wandb_cannot_read_costs_one_line(tmp_path, monkeypatch, online):
    """`WANDB_MODE=on`, say: pydantic refuses wandb's settings, which is no error of wandb."""
    wandb = pytest.importorskip("wandb", reason="wandb is an optional extra")
    warned = []
    monkeypatch.setattr(wandb, "login" if online else "init", lambda **_: wandb.Settings(mode=""))
    if online:
        assert check_wandb(ONLINE, warned.append) is None
    else:
        tracker = WandbTracker("p", directory=tmp_path, warn=warned.append)
        tracker.log(1, STEP)
        tracker.close()
    (line,) = warned
    assert "the run goes on" in line and "got ''" in line and "\n" not in line


def test_wandb_that_cannot_begin_costs_one_warning(tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    (tmp_path / "file").write_text("")
    warned = []
    tracker = WandbTracker("project", directory=tmp_path / "file" / "run", warn=warned.append)
    tracker.log(1, STEP)
    tracker.close()
    (line,) = warned
    assert "the run goes on" in line and "Not a directory" in line


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ECONNRESET], ids=["full disk", "killed"])
def test_wandb_that_fails_in_a_run_costs_one_warning(tmp_path, monkeypatch, number):
    """A full disk, or wandb's process gone: these are the errors that wandb 0.31 raised then."""
    wandb = pytest.importorskip("wandb", reason="wandb is an optional extra")
    warned = []
    tracker = WandbTracker("project", directory=tmp_path, warn=warned.append)
    tracker.log(1, STEP)
    run = tracker._run

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(wandb.Run, "log", fails)
        tracker.log(2, STEP)
        tracker.log(3, STEP)
        tracker.close()
    run.finish()
    (line,) = warned
    assert os.strerror(number) in line and "the run goes on" in line


def test_another_error_of_the_tracker_is_not_hidden(tmp_path, monkeypatch):
    """Negative control: a mistake of ours is no failure of wandb's."""
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    tracker = WandbTracker("project", directory=tmp_path)
    monkeypatch.setattr(services, "log_drift", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tracker.log(1, STEP)
    tracker.close()


ROLLOUT = Rollout(
    step=2,
    sequences=[[1, 2, 65, 66], [1, 67]],
    prompt_lengths=[2, 1],
    logprobs=[torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
    sampling=SamplingParams(),
    places=[(40, 0), (41, 5)],
)
TRAINING = [torch.tensor([-1.0, -2.5]), torch.tensor([math.nan])]


def items(record):
    return {"/".join(item.nested_key): json.loads(item.value_json) for item in record.item}


def test_wandb_shows_drift_as_histograms_a_table_an_artifact_and_an_alert(tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / LOCALIZATION).write_text('{"first": "attention"}')
    mismatches = [None, Mismatch(ROLLOUT.samples(TRAINING), "2 of 3 tokens", bundle)]
    tracker = WandbTracker(
        "project",
        directory=tmp_path,
        take_mismatch=lambda: mismatches.pop(0),
        decode=lambda ids: chr(ids[0]),
    )
    tracker.log(1, STEP | drift_histograms(ROLLOUT.logprobs, ROLLOUT.logprobs))
    tracker.log(2, STEP | drift_histograms(ROLLOUT.logprobs, TRAINING))
    tracker.close()
    found = records(tmp_path)
    first, second = (items(record.history) for record in found if record.HasField("history"))
    assert first["loss"] == STEP["loss"] and not any("/count/" in name for name in first)
    name = "consistency/log10_abs_diff_histogram"
    edges = [-10, -9, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1]
    assert first[f"{name}/bins"] == pytest.approx(edges) == second[f"{name}/bins"]
    assert first[f"{name}/values"] == [3, *[0] * 10]
    assert second[f"{name}/values"] == [1, *[0] * 8, 1, 0]
    ratios = dict(
        zip(
            second["consistency/importance_ratio_histogram/bins"],
            second["consistency/importance_ratio_histogram/values"],
        )
    )
    assert {edge: count for edge, count in ratios.items() if count} == {0.5: 1, 1.0: 1}
    assert not any("worst_tokens" in key for key in first)
    assert second["consistency/worst_tokens/nrows"] == 2
    (file,) = tmp_path.glob("wandb/offline-*/files/media/table/**/worst_tokens_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == [
        *("token", "prompt_id", "sample", "position"),
        *("rollout_logprob", "training_logprob", "difference"),
    ]
    nan, known = table["data"]
    assert nan[:5] == ["C", 41, 5, 0, -3.0] and all(map(math.isnan, nan[5:]))
    assert known == ["B", 40, 0, 1, -2.0, -2.5, -0.5]
    artifacts = [record.artifact for record in found if record.HasField("artifact")]
    (localization,) = [a for a in artifacts if a.type == "localization"]
    assert [entry.path for entry in localization.manifest.contents] == [LOCALIZATION]
    (alert,) = [record.alert for record in found if record.HasField("alert")]
    assert (alert.title, alert.text, alert.level) == (ALERT, "2 of 3 tokens", "ERROR")
    assert alert.wait_duration == 30 * 60 * 1000, "wandb sends no other one before, in ms"


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
    assert {name: {described.standing} for name, described in all_metrics()}.items() <= (
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
