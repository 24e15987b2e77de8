"""Services that a run's metrics go to: wandb, TensorBoard and MLflow, by accelerate's trackers.

A run needs none of them: where one is missing or fails, the run warns once and goes on without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker
from pydantic import ValidationError

from rl_consistency.integrations.wandb_drift import log_drift, log_file
from rl_consistency.parity.drift import worst_tokens
from rl_consistency.parity.drift_monitor import Mismatch
from rl_consistency.parity.histograms import split_counts
from rl_consistency.parity.metric_table import all_metrics
from rl_consistency.parity.replay import LOCALIZATION
from rl_consistency.trainers.config.recipe import RunConfig, dump_config
from rl_consistency.trainers.config.sections import WandbSection
from rl_consistency.trainers.run_directory.inputs import flat
from rl_consistency.trainers.run_directory.step_files import Metrics

if TYPE_CHECKING:
    import wandb

Say = Callable[[str], None]

MISSING = "wandb is not installed: pip install 'rl-consistency[wandb]'"
NO_KEY = "wandb took no key, or was not reached: set WANDB_API_KEY, or set mode to offline"
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow",)}
WITHOUT = "{} logs nothing from here on, and the run goes on ({}). metrics.jsonl has all figures"


def check_wandb(section: WandbSection | None, warn: Say) -> WandbSection | None:
    """The section if a run can log there; else None, after a warning.

    A variable of wandb's that is empty counts as not set. On a terminal wandb asks for the key
    here, before any work.
    """
    if section is None:
        return None
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_")]:
        if not os.environ[name]:  # wandb takes `WANDB_MODE=` for a mode of no name
            del os.environ[name]
    problem = MISSING if find_spec("wandb") is None else None
    if problem is None and section.mode == "online":
        import wandb

        try:
            problem = None if wandb.login() else NO_KEY
        except wandb.Error:
            problem = NO_KEY
        except ValueError as error:  # of wandb's settings
            problem = _in_a_line(error)
    if problem is not None:
        warn(WITHOUT.format("wandb", problem))
    return section if problem is None else None


class Service:
    """A tracker of accelerate's, told the figures of each step.

    Where it raises one of `failures`, `warn` is called once and the rest of the run is not logged
    there. `make` gives the tracker, and `begin` is called with it once it has started.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], GeneralTracker],
        *,
        warn: Say,
        failures: tuple[type[Exception], ...] = (OSError,),
        at_start: tuple[type[Exception], ...] = (),
        begin: Callable[[Any], object] = lambda tracker: None,
    ) -> None:
        self._tracker: Any = None
        self._name, self._warn, self._failures = name, warn, failures

        def start() -> None:
            tracker = make()
            tracker.start()
            self._tracker = tracker
            begin(tracker)

        self._attempt(start, *at_start)

    def log(self, step: int, metrics: Metrics) -> None:
        if self._tracker is not None:
            self._attempt(lambda: self._log(step, metrics))

    def close(self, *, failed: bool = False) -> None:
        if self._tracker is not None:
            self._attempt(lambda: self._finish(failed))

    def _log(self, step: int, metrics: Metrics) -> None:
        figures, _ = split_counts(metrics)
        numbers = {name: value for name, value in figures.items() if not isinstance(value, str)}
        self._tracker.log(numbers, step=step)

    def _finish(self, failed: bool) -> None:
        self._tracker.finish()

    def _attempt(self, action: Callable[[], object], *others: type[Exception]) -> None:
        """Do it, or leave the service alone from here on."""
        try:
            action()
        except (*self._failures, *others) as error:
            self._tracker = None
            self._warn(WITHOUT.format(self._name, _in_a_line(error)))


class WandbTracker(Service):
    """Logs to Weights & Biases, into `directory`; the same `run_id` continues the same run.

    `mode` "offline" needs neither key nor network; upload later with `wandb sync`. Failures are no
    network at the start, a full disk, its process gone. `samples` gives the completions of the
    logged step that people are shown, as a table; `given` are further arguments of `wandb.init`.
    `check_wandb` says beforehand whether wandb is there.
    """

    def __init__(
        self,
        project: str,
        *,
        directory: str | os.PathLike[str],
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: Literal["offline", "online"] = "offline",
        run_id: str | None = None,
        samples: Callable[[], Sequence[Mapping[str, Any]]] = list,
        take_mismatch: Callable[[], Mismatch | None] = lambda: None,
        decode: Callable[[list[int]], str] = str,
        warn: Say = print,
        **given: Any,
    ) -> None:
        import wandb

        self._samples, self._take_mismatch, self._decode = samples, take_mismatch, decode
        failures = (OSError, wandb.Error)

        def make() -> GeneralTracker:
            Path(directory).mkdir(parents=True, exist_ok=True)
            return WandBTracker(
                project,
                name=name,
                dir=os.fspath(directory),
                config=dict(config or {}),
                mode=mode,
                id=run_id,
                resume=None if run_id is None else "allow",
                settings=wandb.Settings(silent=True),
                **{key: value for key, value in given.items() if value},
            )

        def begin(tracker: Any) -> None:
            for key, metric in all_metrics():
                tracker.run.define_metric(key, summary=metric.standing)

        # A ValueError also of an environment that wandb cannot read.
        options: dict[str, Any] = {"failures": failures, "at_start": (ValueError,), "begin": begin}
        super().__init__("wandb", make, warn=warn, **options)

    @property
    def _run(self) -> wandb.Run | None:
        return None if self._tracker is None else self._tracker.run

    def log(self, step: int, metrics: Metrics) -> None:
        self._mismatch = self._take_mismatch()
        super().log(step, metrics)

    def _log(self, step: int, metrics: Metrics) -> None:
        import wandb

        mismatch, run = self._mismatch, self._tracker.run
        figures, counts = split_counts(metrics)
        if rows := self._samples():
            columns: list[Any] = [name for name, v in rows[0].items() if not isinstance(v, dict)]
            figures["samples"] = wandb.Table(columns, [[row[n] for n in columns] for row in rows])
        worst = [] if mismatch is None else worst_tokens(mismatch.samples, self._decode)
        message = None if mismatch is None else mismatch.message
        log_drift(run, figures, counts, worst, message, step=step)
        if mismatch is not None and mismatch.bundle is not None:
            log_file(run, mismatch.bundle / LOCALIZATION, "localization")

    def _finish(self, failed: bool) -> None:
        self._tracker.run.finish(exit_code=int(failed))


class _MLflow(Service):
    def _finish(self, failed: bool) -> None:
        mlflow: Any = import_module("mlflow")
        mlflow.end_run("FAILED" if failed else "FINISHED")


def missing_services(config: RunConfig) -> dict[str, str]:
    """TensorBoard and MLflow, where a recipe asks for them and they are not installed -> a line."""
    return {
        name: WITHOUT.format(name, f"it is not installed: pip install 'rl-consistency[{name}]'")
        for name, packages in _PACKAGES.items()
        if getattr(config.tracking, name) is not None and not any(map(find_spec, packages))
    }


def services_of(run: Any) -> Iterator[Service]:
    """TensorBoard and MLflow, where the recipe of a run asks for them and they are installed."""
    config: RunConfig = run.config
    missing = missing_services(config)
    for line in missing.values():
        run.announce(line)
    for name, begun in (("tensorboard", _tensorboard), ("mlflow", _mlflow)):
        if getattr(config.tracking, name) is not None and name not in missing:
            yield begun(run, config)


def _tensorboard(run: Any, config: RunConfig) -> Service:
    """A folder of the run's name and id; a resumed run goes on in it, without the steps that are
    taken again."""
    section, name = config.tracking.tensorboard, f"{config.run.name}-{run.wandb_run_id}"
    assert section is not None
    directory = section.dir or config.run.output_dir / "tensorboard"
    given = {"purge_step": run.first_step} if run.resumed else {}
    text = f"```yaml\n{dump_config(config)}```"
    return Service(
        "tensorboard",
        lambda: TensorBoardTracker(name, directory, **given),
        warn=run.announce,
        begin=lambda tracker: run.resumed or tracker.log({"config": text}, step=0),
    )


def _mlflow(run: Any, config: RunConfig) -> Service:
    """A run of an experiment; a resumed run goes on with it."""
    mlflow: Any = import_module("mlflow")
    section = config.tracking.mlflow
    assert section is not None

    def begin(tracker: Any) -> None:
        if not run.resumed:
            tracker.store_init_configuration(dict(flat(config.model_dump(mode="json"))))
        run.mlflow_run_id = tracker.tracker.info.run_id

    def make() -> GeneralTracker:
        if section.tracking_uri is not None:
            mlflow.set_tracking_uri(section.tracking_uri)
        return MLflowTracker(
            section.experiment,
            run_id=run.mlflow_run_id,
            run_name=section.name or config.run.name,
            tags=dict(section.tags) or None,
            nested_run=mlflow.active_run() is not None,
        )

    failures = (OSError, mlflow.exceptions.MlflowException)
    return _MLflow("mlflow", make, warn=run.announce, failures=failures, begin=begin)


def _in_a_line(error: Exception) -> str:
    """What an error of a service says; of settings of wandb each problem."""
    if isinstance(error, ValidationError):
        each = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.40}"
            for e in error.errors(include_url=False)
        ]
        return f"its settings, see the WANDB_ variables: {'; '.join(each)}"
    return " ".join(str(error).split()) or type(error).__name__
