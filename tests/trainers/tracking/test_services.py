"""TensorBoard, MLflow and wandb as accelerate's trackers, told what a run logs."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rl_consistency.trainers import services
from rl_consistency.trainers.config.sections import TrackingSection, WandbSection


class Recorder:
    """Stands for one of accelerate's trackers."""

    name, fails_at = "", ""

    def __init__(self, *given, **options):
        self.given, self.options, self.told = given, options, []
        self.made.append(self)

    def _do(self, what, *given):
        if what == self.fails_at:
            raise OSError("no space left")
        self.told.append((what, *given))

    def start(self):
        self._do("start")
        self.tracker = SimpleNamespace(info=SimpleNamespace(run_id="run-7"))

    def store_init_configuration(self, values):
        self._do("config", values)

    def log(self, values, step):
        self._do("log", step, values)

    def finish(self):
        self._do("finish")


@pytest.fixture
def recorders(monkeypatch):
    """Trackers by the name of their service, which are made in place of accelerate's."""
    made = {"tensorboard": [], "mlflow": []}
    for name, kind in {"tensorboard": "TensorBoardTracker", "mlflow": "MLflowTracker"}.items():
        fake = type(kind, (Recorder,), {"name": name, "made": made[name]})
        monkeypatch.setattr(services, kind, fake)
    mlflow = ModuleType("mlflow")
    mlflow.exceptions = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))
    mlflow.active_run, mlflow.ended = (lambda: None), []
    mlflow.end_run, mlflow.set_tracking_uri = mlflow.ended.append, lambda uri: None
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(services, "find_spec", lambda name: object())
    return SimpleNamespace(**made, mlflow_module=mlflow)


BOTH = {"tracking.tensorboard": True, "tracking.mlflow": {"experiment": "bits", "tags": {"a": "b"}}}


def test_a_run_tells_both_its_figures_and_a_resumed_one_goes_on_there(tiny_run, recorders):
    tiny_run(**BOTH, **{"training.steps": 1, "training.save_every": 1})
    tiny_run(**BOTH, **{"training.steps": 2}, resume=True)
    board, again = recorders.tensorboard
    assert board.given[0].startswith("tiny-") and again.given[0] == board.given[0]
    assert board.given[1] == tiny_run.directory / "run" / "tensorboard"
    assert (board.options, again.options) == ({}, {"purge_step": 2})
    (_, config, (_, step, figures), end), (_, (_, next_step, _), _) = board.told, again.told
    assert "steps: 1" in config[2]["config"] and (step, next_step) == (1, 2)
    assert end == ("finish",) and figures["consistency/mismatched_tokens"] == 0
    assert all(isinstance(value, int | float) for value in figures.values())
    first, second = recorders.mlflow
    assert first.given == second.given == ("bits",) and first.options["tags"] == {"a": "b"}
    assert (first.options["run_id"], second.options["run_id"]) == (None, "run-7")
    assert first.told[1][1]["training.steps"] == "1"
    assert [told[0] for told in second.told] == ["start", "log"]
    assert recorders.mlflow_module.ended == ["FINISHED", "FINISHED"]


@pytest.mark.parametrize("fails_at", ["start", "log", "finish"])
def test_a_service_that_fails_costs_one_line_and_no_step(
    tiny_run, recorders, monkeypatch, fails_at
):
    monkeypatch.setattr(Recorder, "fails_at", fails_at)
    told = []
    summary, _ = tiny_run(
        **{"tracking.tensorboard": {"dir": str(tiny_run.directory / "boards")}},
        **{"training.steps": 1, "training.save_every": None},
        announce=told.append,
    )
    (line,) = [line for line in told if "tensorboard" in line]
    assert "the run goes on (no space left)" in line and summary["steps"] == 1


def test_a_missing_package_is_named_with_what_installs_it(tiny_run, monkeypatch):
    monkeypatch.setattr(services, "find_spec", lambda name: None)
    told = []
    run = SimpleNamespace(config=tiny_run.config(**BOTH), announce=told.append)
    assert list(services.services_of(run)) == []
    for name, line in zip(("tensorboard", "mlflow"), told, strict=True):
        assert f"pip install 'rl-consistency[{name}]'" in line and "the run goes on" in line


def test_a_section_of_defaults_is_true(tiny_run):
    section = TrackingSection(tensorboard=True, mlflow=True)
    assert section.tensorboard.dir is None and section.mlflow.experiment == "rl_consistency"
    off = TrackingSection(tensorboard=False, mlflow=None)
    assert off.tensorboard is None and off.mlflow is None


def test_wandb_is_given_entity_group_and_tags(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is an optional extra")
    given = {}

    def init(**options):
        given.update(options)
        raise OSError("not here")

    monkeypatch.setattr(wandb, "init", init)
    section = WandbSection(project="p", entity="us", group="seeds", tags=("a", "b"))
    further = section.model_dump(include={"entity", "group", "tags"})
    services.WandbTracker("p", directory=tmp_path, warn=str, **further)
    assert (given["project"], given["entity"], given["group"]) == ("p", "us", "seeds")
    assert list(given["tags"]) == ["a", "b"]
    given.clear()
    services.WandbTracker("p", directory=tmp_path, warn=str, **{"group": None, "tags": ()})
    assert "tags" not in given and "group" not in given
