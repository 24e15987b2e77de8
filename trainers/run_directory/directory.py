"""A run's directory: what may be started or resumed there, and what a new run removes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl_consistency.trainers.config.recipe import RunConfig, dump_config

REFERENCE = "reference.safetensors"
RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "drift.png",
    REFERENCE,
    "checkpoints",
    "replay",
    "wandb",
)
"""What a run leaves in its directory, and all that `overwrite` removes from it."""


class RunDirectoryError(ValueError):
    """A run directory that cannot be started in or resumed from."""


def check_directory(config: RunConfig, *, resume: bool, overwrite: bool) -> None:
    """RunDirectoryError, with its remedy, where the run cannot be started or continued."""
    directory = config.run.output_dir
    if directory.exists() and not directory.is_dir():
        raise RunDirectoryError(f"run.output_dir: {directory} is not a directory; choose another.")
    started = any((directory / name).exists() for name in RUN_FILES)
    if resume:
        if not started:
            raise RunDirectoryError(f"{directory} holds no run to resume; leave out --resume.")
        _require_same_config(directory / "config.yaml", config)
    elif started and not overwrite:
        raise RunDirectoryError(
            f"{directory} already holds a run; continue it with --resume, remove it with "
            "--overwrite, or choose another with --set run.output_dir=DIR."
        )
    policy = config.policy.path
    if overwrite and policy is not None and directory.resolve() in policy.resolve().parents:
        raise RunDirectoryError(
            f"policy.path {policy} lies inside {directory}, which --overwrite would remove: choose "
            "another run.output_dir."
        )


def open_directory(config: RunConfig) -> None:
    """Make the run directory, without what an earlier run left in it, and save the config there."""
    directory = config.run.output_dir
    directory.mkdir(parents=True, exist_ok=True)
    for name in RUN_FILES:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    write_atomically(directory / "config.yaml", dump_config(config))


def _require_same_config(file: Path, config: RunConfig) -> None:
    if not file.is_file() or file.read_text("utf-8") != dump_config(config):
        raise RunDirectoryError(
            f"{file} is not the configuration given now; resume with the recipe and --set values "
            "the run was started with."
        )


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one piece: a kill leaves the old text or the new."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
