"""`rl-consistency tune`: arguments, tables, exit statuses; the measurement is a stand-in."""

import json

import pytest
import torch

from rl_consistency.cli import tune as command
from rl_consistency.cli.main import main
from rl_consistency.cli.tune import seconds_of
from rl_consistency.tuning import tune as tuning
from rl_consistency.tuning.tune import Outcome, TuningReport
from rl_consistency.verify.presets import preset_config


@pytest.fixture
def directory(tmp_path):
    """A model directory that has no weights: none are read."""
    preset_config("tiny-llama").save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU; `.outcome` makes that of a work, `.asked` is what it was told."""

    class Gpu:
        asked = None

        def __call__(self, works, device, *, budget, again, tell):
            self.asked = {"works": works, "budget": budget, "again": again}
            outcomes = [self.outcome(work) for work in works[:3]]
            for outcome in outcomes:
                tell(None, outcome.work.key)
                tell(outcome, outcome.work.key)
            left_out = {work.entry: "the budget of 60 s was spent" for work in works[3:]}
            return TuningReport(outcomes=outcomes, left_out=left_out, path="/c/f.json", seconds=4.2)

        def outcome(self, work):
            return Outcome(
                work=work, default=work.picked, default_us=30.0, winner="fast", winner_us=20.0
            )

    stand_in = Gpu()
    monkeypatch.setattr(tuning, "tune_device", stand_in)
    monkeypatch.setattr(command, "tunable_device", lambda name: torch.device("cpu"))
    return stand_in


def test_winners_are_shown_and_what_was_left_out(directory, gpu, capsys):
    assert main(["tune", "--model", str(directory), "--rows", "64"]) == 0
    out = capsys.readouterr().out
    assert "3 works with a faster schedule" in out and out.count("1.50 x") == 3
    assert "30.0 -> 20.0 us  fast" in out
    count = len(gpu.asked["works"])
    assert f"left out {count - 3}, the op's rule stays: the budget of 60 s was spent" in out
    assert f"3 of {count} works, 0 of them known, 3 with a faster schedule, 4 s" in out
    assert gpu.asked["budget"] == 60.0 and not gpu.asked["again"]


def test_a_withdrawn_candidate_is_named_and_the_status_is_1(directory, gpu, capsys):
    outcome = gpu.outcome
    gpu.outcome = lambda work: Outcome(
        **{**vars(outcome(work)), "withdrawn": {"odd": "3 of 8 elements differ from own"}}
    )
    assert main(["tune", "--model", str(directory), "--budget", "2m", "--again"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "withdrawn " in out and ": odd: 3 of 8 elements differ from own" in out
    assert "WITHDRAWN: odd" in out
    assert gpu.asked["budget"] == 120.0 and gpu.asked["again"]


def test_the_models_dtype_is_taken_unless_another_is_asked_for(directory, gpu):
    main(["tune", "--model", str(directory)])
    assert all("/fp32/" in work.entry for work in gpu.asked["works"])
    main(["tune", "--model", str(directory), "--dtype", "bfloat16"])
    assert all("/bf16/" in work.entry for work in gpu.asked["works"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to tune: no CUDA device is available here"),
        (["--device", "cpu"], "nothing to tune on cpu: the CPU has one schedule for each op"),
        (["--budget", "soon"], "--budget 'soon': give a time such as 60s or 2m"),
        (["--budget", "0s"], "--budget '0s'"),
    ],
)
def test_bad_input_is_one_message_and_status_2(directory, capsys, options, message):
    assert main(["tune", "--model", str(directory), *options]) == 2
    assert message in capsys.readouterr().err


def test_rows_and_architectures_without_orders_are_refused(directory, gpu, capsys):
    assert main(["tune", "--model", str(directory), "--rows", "0"]) == 2
    assert "1 or more" in capsys.readouterr().err
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert main(["tune", "--model", str(directory)]) == 2
    assert "gpt2" in capsys.readouterr().err
    assert main(["tune", "--model", str(directory / "none")]) == 2
    assert "no model directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60.0), ("90", 90.0), ("1.5m", 90.0), ("2min", 120.0)]
)
def test_a_budget_has_a_unit(text, seconds):
    assert seconds_of(text) == seconds
