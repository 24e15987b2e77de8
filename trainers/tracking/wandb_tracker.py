"""The tracker of Weights & Biases. A run does not need it: its failures cost one warning."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_consistency.integrations.wandb_drift import log_drift, log_file
from rl_consistency.parity.histograms import split_counts
from rl_consistency.parity.metrics import all_metrics
from rl_consistency.parity.monitor import Mismatch
from rl_consistency.parity.replay import LOCALIZATION
from rl_consistency.trainers.config.sections import WandbSection
from rl_consistency.trainers.run_directory.step_files import Metrics

if TYPE_CHECKING:
    import wandb

MISSING = "wandb is not installed: pip install 'rl-consistency[wandb]'"
NO_KEY = (
    "wandb took no key, or was not reached: set WANDB_API_KEY, run `wandb login`, or set mode to "
    "offline"
)
WITHOUT = "wandb logs nothing from here on, and the run goes on ({}). metrics.jsonl has all figures"


def check_wandb(section: WandbSection | None, warn: Callable[[str], None]) -> WandbSection | None:
    """The section if a run can log there; else None, after a warning.

    On a terminal wandb asks for the key here, before any work.
    """
    if section is None:
        return None
    if find_spec("wandb") is None:
        warn(WITHOUT.format(MISSING))
        return None
    if section.mode == "online":
        import wandb

        known = False
        with suppress(wandb.Error):
            known = wandb.login()
        if not known:
            warn(WITHOUT.format(NO_KEY))
            return None
    return section


class WandbTracker:
    """Logs to Weights & Biases, into `directory`; the same `run_id` continues the same run.

    `mode` "offline" needs neither key nor network; upload later with `wandb sync`. Where wandb
    cannot go on (no network at the start, a full disk, its process gone), `warn` is called once
    and the rest of the run is not logged there. `samples` gives the completions of the logged step
    that people are shown, as a table.

    Raises: ImportError when wandb is not installed, ValueError on another mode than the two.
    """

    def __init__(
        self,
        project: str,
        *,
        directory: str | os.PathLike[str],
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: str = "offline",
        run_id: str | None = None,
        samples: Callable[[], Sequence[Mapping[str, Any]]] = list,
        take_mismatch: Callable[[], Mismatch | None] = lambda: None,
        decode: Callable[[list[int]], str] = str,
        warn: Callable[[str], None] = print,
    ) -> None:
        if mode not in ("offline", "online"):
            raise ValueError(f"wandb mode must be 'offline' or 'online', got {mode!r}")
        try:
            import wandb
        except ImportError as error:
            raise ImportError(MISSING) from error
        self._run: wandb.Run | None = None
        self._failures = (OSError, wandb.Error)
        self._samples = samples
        self._take_mismatch, self._decode, self._warn = take_mismatch, decode, warn

        def begin() -> None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=project,
                name=name,
                dir=os.fspath(directory),
                config=dict(config or {}),
                mode=mode,
                id=run_id,
                resume=None if run_id is None else "allow",
                settings=wandb.Settings(silent=True),
            )
            for key, metric in all_metrics():
                self._run.define_metric(key, summary=metric.standing)

        self._attempt(begin)

    def log(self, step: int, metrics: Metrics) -> None:
        mismatch = self._take_mismatch()
        if (run := self._run) is not None:
            self._attempt(lambda: self._log(run, step, metrics, mismatch))

    def close(self, *, failed: bool = False) -> None:
        if (run := self._run) is not None:
            self._attempt(lambda: run.finish(exit_code=int(failed)))

    def _log(self, run: wandb.Run, step: int, metrics: Metrics, mismatch: Mismatch | None) -> None:
        figures, counts = split_counts(metrics)
        figures |= {"samples": _table(rows)} if (rows := self._samples()) else {}
        worst = [] if mismatch is None else mismatch.worst(self._decode)
        message = None if mismatch is None else mismatch.message
        log_drift(run, figures, counts, worst, message, step=step)
        if mismatch is not None and mismatch.bundle is not None:
            log_file(run, mismatch.bundle / LOCALIZATION, "localization")

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do it, or leave wandb alone from here on."""
        try:
            action()
        except self._failures as error:
            self._run = None
            self._warn(WITHOUT.format(str(error) or type(error).__name__))


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    plain = {name for name, value in rows[0].items() if not isinstance(value, dict)}
    columns: list[Any] = [name for name in rows[0] if name in plain]
    return wandb.Table(columns, [[row[name] for name in columns] for row in rows])
