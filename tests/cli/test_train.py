import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_consistency.cli import plots, report, train
from rl_consistency.cli.arguments import COMMANDS
from rl_consistency.cli.main import main
from rl_consistency.trainers import run as run_module
from rl_consistency.trainers import tracking
from rl_consistency.trainers.config.recipe import find_recipe, load_config
from rl_consistency.trainers.run_directory.directory import RunDirectoryError
from tests.trainers.conftest import RECIPE as TINY

RECIPE = TINY | {
    "reward": {"functions": [{"name": "arithmetic"}]},
    "algorithm": {"entropy_coefficient": 0.01},  # the rewards, all 0, give no gradient
    "training": {"steps": 2, "eval_every": 2},
    "consistency": {"gradient_check_every": 2, "shadow_every": 1},
    "tracking": {},
}
ROOT = Path(__file__).parents[2]


def recipe_in(directory):
    file = directory / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    return [str(file), "--set", f"run.output_dir={directory / 'run'}"]


@pytest.fixture
def recipe(tmp_path):
    """The arguments that name the recipe and where its run goes."""
    return recipe_in(tmp_path)


def run_command(arguments):
    parser = argparse.ArgumentParser()
    COMMANDS["train"].add_arguments(parser)
    return train.run(parser.parse_args(arguments))


@pytest.fixture
def command(recipe):
    return lambda *arguments: run_command([*recipe, *arguments])


def test_what_was_imported_uncollected_is_collected_at_the_end():
    """What is left there nanobind lists: 30 lines of Triton 3.9 after every command."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()));"
        "from rl_consistency.cli.train import uncollected_imports\n"
        "with uncollected_imports(): pass\n"
        "print(gc.get_freeze_count())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    during, after = map(int, found.stdout.split())
    assert during > 0 == after


def test_overwriting_a_run_by_its_own_recipe_is_refused_and_loses_nothing(tmp_path, recipe):
    mine = tmp_path / "run" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text("# my notes\n" + Path(recipe[0]).read_text())
    named = [str(mine), "--set", f"run.output_dir={mine.parent}", "--overwrite"]
    with pytest.raises(RunDirectoryError, match="the recipe .*config.yaml"):
        run_command(named)
    assert mine.read_text().startswith("# my notes") and os.listdir(mine.parent) == [mine.name]


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    """What a run without drift ended with."""
    directory = tmp_path_factory.mktemp("summary")
    assert run_command(recipe_in(directory)) == 0
    return json.loads((directory / "run" / "summary.json").read_text())


@pytest.fixture
def told(monkeypatch):
    """What a tracker learns of how runs end, one entry a run."""
    found = []

    class Wandb:
        def __init__(self, project, **given):
            pass

        def log(self, step, metrics):
            pass

        def close(self, *, failed):
            found.append(failed)

    monkeypatch.setattr(tracking, "WandbTracker", Wandb)
    monkeypatch.setattr(run_module, "check_wandb", lambda section, warn: section)
    return found


TRACKED = ("--set", "tracking={wandb: {project: bits}}")
DRIFTING = ("--set", "consistency={strict: false, on_drift: record}")


def test_a_run_without_drift_succeeds_and_shows_both_sides(command, tmp_path, capsys):
    assert command() == 0
    directory = tmp_path / "run"
    shown = capsys.readouterr().out
    summary = json.loads((directory / "summary.json").read_text())
    assert (directory / "drift.png").is_file() and (directory / "report.html").is_file()
    for text in (
        "tiny: 2 steps",
        "stock Hugging Face",
        f"{summary['consistency/tokens']:,}",
        "gradient checks passed",
        "1 of 1",
        "first-update ratio",
        "drift.png",
        "report.html",
    ):
        assert text in shown, text
    assert summary["stock/mismatched_tokens"] > 0


@pytest.mark.parametrize(
    ("processes", "depend", "caption"),
    [
        (1, False, None),
        (2, False, "2 processes, fsdp2; the weights do not depend on the number of processes"),
        (2, True, "2 processes, fsdp2; the weights depend on the number of processes"),
    ],
)
def test_the_table_says_what_the_weights_depend_on(summary, processes, depend, caption):
    given = {"processes": processes, "strategy": "fsdp2", "weights_depend_on_processes": depend}
    assert train.summary_table(summary | given).caption == caption


def test_the_table_counts_the_values_of_a_critic_where_there_is_one(summary):
    plain = list(train.summary_table(summary).columns[0].cells)
    name = "consistency/value_check"
    table = train.summary_table(summary | {f"{name}/values": 1200, f"{name}/mismatched_values": 3})
    labels, figures, _ = (list(column.cells) for column in table.columns)
    assert set(labels) - set(plain) == {"values of the critic that differ"}
    assert figures[labels.index("values of the critic that differ")] == "3 of 1,200"


def test_the_table_says_how_many_gradient_checks_had_no_gradient(summary):
    given = {"checks": 2, "passed": 2, "without_gradient": 3}
    found = summary | {f"consistency/gradient_check/{name}": n for name, n in given.items()}
    labels, figures, _ = (list(column.cells) for column in train.summary_table(found).columns)
    assert figures[labels.index("gradient checks passed")] == "2 of 2, 3 had no gradient"


@pytest.mark.parametrize(("arguments", "status", "failed"), [((), 0, False), (DRIFTING, 1, True)])
def test_trackers_learn_what_the_status_says(recipe, told, arguments, status, failed, undrawn):
    assert main(["train", *recipe, *TRACKED, *arguments]) == status
    assert told == [failed]


def test_trackers_that_are_told_of_the_end_alone_take_drift_for_success(recipe, told, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(run_module, "passed", lambda summary: True)
    for module, name in ((plots, "save_picture"), (report, "render")):
        monkeypatch.setattr(module, name, lambda directory: None)
    assert main(["train", *recipe, *TRACKED, *DRIFTING]) == 1
    assert told == [False]


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (run_module, "write_summary"),
        pytest.param(plots, "save_picture", marks=pytest.mark.thorough),
        pytest.param(report, "render", marks=pytest.mark.thorough),
    ],
)
def test_trackers_learn_that_the_end_of_a_run_failed(
    recipe, told, monkeypatch, module, name, undrawn
):
    monkeypatch.setattr(module, name, full)
    assert main(["train", *recipe, *TRACKED]) == 2
    assert told == [True]


def test_trackers_that_are_closed_before_the_report_take_its_failure_for_success(
    recipe, told, monkeypatch
):
    """Negative control."""
    real = run_module.train

    def closed_first(config, *, finish, **given):
        real(config, **given)
        finish()

    monkeypatch.setattr(run_module, "train", closed_first)
    monkeypatch.setattr(plots, "save_picture", full)
    assert main(["train", *recipe, *TRACKED]) == 2
    assert told == [False]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough)],
)
def test_trackers_learn_of_a_run_that_a_signal_ends_and_it_resumes(
    recipe, told, tmp_path, monkeypatch, number, status, undrawn
):
    (tmp_path / "ending.py").write_text(
        "import os\nsteps = []\ndef reward(completions, **_):\n    steps.append(1)\n"
        f"    if len(steps) == 2: os.kill(os.getpid(), {int(number)})\n"
        "    return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = ("reward.functions=[{name: 'ending:reward'}]", "training.save_every=1")
    changes = [part for c in (*changes, "training.eval_every=0") for part in ("--set", c)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["train", *recipe, *TRACKED, *changes]) == status
        assert told == [True]
        assert main(["train", *recipe, *TRACKED, *changes, "--resume"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
        sys.modules.pop("ending")
    assert told == [True, False]


@pytest.mark.thorough
def test_an_output_without_room_is_not_taken_for_the_disk_of_the_run(recipe):
    command = [sys.executable, "-m", "rl_consistency", "train", *recipe]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    text = b"error: standard output cannot be written to: No space left on device"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, text)


def test_a_run_is_resumed_or_replaced_only_when_told(command, undrawn):
    assert command() == 0
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        command()
    assert command("--resume") == 0
    assert command("--overwrite") == 0


def test_the_whole_recipe_is_printed_and_reads_back_without_a_run(command, tmp_path, capsys):
    name = "x" * 300  # longer than any terminal
    assert command("--print-config", "--set", f"data.prompt_template={name} {{prompt}}") == 0
    assert not (tmp_path / "run").exists()
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out, "utf-8")
    config = load_config(printed)
    assert config.data.prompt_template == f"{name} {{prompt}}" and config.training.steps == 2
    assert config.training.micro_batch_size == 8  # a default


def test_a_folder_of_a_recipe_s_name_hides_no_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo_arithmetic_tiny_cpu").mkdir()
    assert find_recipe("ppo_arithmetic_tiny_cpu").is_file()
