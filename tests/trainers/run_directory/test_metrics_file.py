import json
import math

import pytest
import torch

from rl_consistency.trainers.run_directory import step_files
from rl_consistency.trainers.run_directory.manifest import state_of
from rl_consistency.trainers.run_directory.step_files import MetricsFile, read_metrics, summary_of

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
    tracker.log(1, STEP | {"consistency/gradient_digest": "ab", "passed": True})
    tracker.log(2, STEP)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0] == {
        "step": 1,
        **STEP,
        "consistency/gradient_digest": "ab",
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
        (2, {"loss": "low"}, TypeError, "'loss'.*got str"),
        (2, {"loss": 10**400}, ValueError, "'loss' is beyond 1e.50"),
        (2, {"loss": -1e308}, ValueError, "'loss' is beyond 1e.50"),
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


def state_after(path, steps):
    """What a checkpoint keeps of the file when these steps have been logged."""
    write(path, steps)
    return state_of(path.read_bytes())


def test_resuming_cuts_later_steps_and_an_unfinished_line(tmp_path):
    path = tmp_path / "m.jsonl"
    state = state_after(path, range(1, 6))
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 6, "loss": 1}\n{"step": 7, "lo')
    write(path, [6, 7], resume_from=state)
    assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7] and path.read_bytes().startswith(before)


@pytest.mark.parametrize("damage", ["missing", "a hole", "one bit", "truncated"])
def test_resuming_after_damage_is_refused_and_changes_nothing(tmp_path, damage):
    path = tmp_path / "m.jsonl"
    state = state_after(path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        {
            "missing": b"",
            "a hole": lines[0] + lines[2] + b'{"step": 4, "loss": 0.25}\n',
            "one bit": b"".join(lines).replace(b"0.125", b"0.135"),
            "truncated": b"".join(lines)[:-3],
        }[damage]
    )
    before = path.read_bytes()
    if damage == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=r"m\.jsonl is missing or damaged"):
        MetricsFile(path, resume_from=state)
    assert path.exists() == (damage != "missing")
    assert not path.exists() or path.read_bytes() == before


@pytest.mark.parametrize(
    "tail",
    [
        *(line + b'\n{"step": 9}\n' for line in (b"not json", b"[1]", b'{"loss": 1}')),
        *(line + b'\n{"step": 9}\n' for line in (b'{"step": 1}', b'{"step": "3"}')),
        *(b'{"step": 3, "lo', b'{"step": 3}'),  # unfinished
    ],
)
def test_a_damaged_line_is_named_not_dropped(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(ValueError, match=r"m\.jsonl, line 3"):
        read_metrics(path)
    assert path.read_bytes().endswith(tail)


@pytest.mark.parametrize(
    "value", ["1" + "0" * 400, "1e308", "-1e308", "1e400", '"abc"', "null", "[1]", "{}"]
)
@pytest.mark.parametrize("name", ["step", "reward/mean"])
def test_what_is_no_metric_is_named_with_file_and_line(tmp_path, name, value):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    line = {"step": "3", "reward/mean": "0.5"} | {name: value}
    path.write_text(
        path.read_text() + "{" + ", ".join(f'"{k}": {v}' for k, v in line.items()) + "}\n"
    )
    with pytest.raises(ValueError, match=r"m\.jsonl, line 3") as caught:
        read_metrics(path)
    assert name in str(caught.value) or value == "1e400"
    assert len(str(caught.value)) < 300 + len(str(path))


def test_without_the_check_a_metric_that_is_no_float_ends_the_summary(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(step_files, "_check_metrics", lambda metrics: None)
    (tmp_path / "m.jsonl").write_text(f'{{"step": 1, "reward/mean": {10**400}}}\n')
    with pytest.raises(OverflowError):
        summary_of(read_metrics(tmp_path / "m.jsonl"), {})


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    tracker = MetricsFile(tmp_path / "m.jsonl")
    tracker.log(1, STEP)

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step_files.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            tracker.log(2, STEP)
    assert steps_of(tmp_path / "m.jsonl") == [1]
    tracker.log(2, STEP)
    tracker.close()
    assert steps_of(tmp_path / "m.jsonl") == [1, 2]
