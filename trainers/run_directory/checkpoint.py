"""Checkpoints: a model directory that also holds what a run needs to continue bit for bit.

    checkpoints/step_000030/
        config.json, model.safetensors, tokenizer files     loadable by from_pretrained
        optimizer.safetensors                               moments and master weights
        trainer.json                                        step, schedule, totals, fingerprint

A checkpoint is written under a temporary name, flushed, and renamed at the end: an interrupt or a
full disk leaves the previous one whole. Loading it runs none of its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_consistency.numerics.fingerprint import Fingerprint

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "trainer.json"
_PARTIAL, _REPLACED = ".partial", ".replaced"
_KEPT = ("schedule", "totals", "extra")
_REMEDY = "Remove this checkpoint directory and resume from the one before it."


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message says which and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run continues from: its parts as `save_checkpoint` was given them."""

    path: Path
    step: int
    """Training steps done; 0 is after the warm start."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    schedule: dict[str, Any]
    totals: dict[str, Any]
    """The hook's state."""
    extra: dict[str, Any]
    """Plain values the trainer keeps across a restart."""


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    optimizer: Mapping[str, Tensor],
    schedule: Mapping[str, Any],
    totals: Mapping[str, Any],
    extra: Mapping[str, Any],
    fingerprint: Fingerprint,
    keep: int,
) -> Path:
    """Write `directory/step_NNNNNN`, remove all but the newest `keep`; CheckpointError if not."""
    target = directory / f"step_{step:06d}"
    partial = target.with_name(target.name + _PARTIAL)
    with _explained(f"the checkpoint {target}", partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(partial)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        save_file(_weights(model), partial / WEIGHTS, metadata={"format": "pt"})
        save_file({k: v.detach().contiguous() for k, v in optimizer.items()}, partial / OPTIMIZER)
        state = {
            "format": FORMAT,
            "step": step,
            "schedule": dict(schedule),
            "totals": dict(totals),
            "extra": dict(extra),
            "fingerprint": fingerprint.entries,
            "sha256": {name: _sha256(partial / name) for name in (WEIGHTS, OPTIMIZER)},
        }
        (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        _flush(*partial.rglob("*"), partial)
        replaced = target.with_name(target.name + _REPLACED)
        if target.exists():
            os.replace(target, replaced)
        os.replace(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
        _flush(directory)
    for old in list_checkpoints(directory)[:-keep]:
        (old / STATE).unlink()  # first: what is half removed must not be listed
        shutil.rmtree(old)
    return target


def save_weights(file: Path, model: Any) -> None:
    """Write a model's parameters to one file; CheckpointError, and no file, if the disk refuses."""
    partial = file.with_name(file.name + _PARTIAL)
    with _explained(str(file), partial):
        save_file(_weights(model), partial, metadata={"format": "pt"})
        os.replace(partial, file)


def read_weights(file: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote; CheckpointError if it is missing or truncated."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is missing, truncated or damaged ({error}); restore it, or use --overwrite."
        ) from error


@contextmanager
def _explained(what: str, partial: Path) -> Iterator[None]:
    """Remove `partial` on any failure, and say what a failing disk means for the run."""
    try:
        yield
    except BaseException as error:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        # tokenizers reports a failed write as a bare Exception.
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise CheckpointError(
                f"cannot write {what}: {error}. Earlier checkpoints are whole; free some space "
                "(training.keep_checkpoints) and continue with --resume."
            ) from error
        raise


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; leftovers of an interrupted write are not listed."""
    steps = {path.name.removeprefix("step_"): path for path in directory.glob("step_*")}
    complete = [step for step in steps if step.isdigit() and (steps[step] / STATE).is_file()]
    return [steps[step] for step in sorted(complete, key=int)]


def load_checkpoint(path: Path, fingerprint: Fingerprint) -> Checkpoint:
    """Read a checkpoint; CheckpointError on damaged files or another fingerprint than this."""
    state = _read_state(path)
    if difference := fingerprint.difference(Fingerprint(state["fingerprint"])):
        raise CheckpointError(
            f"{path} was written under another fingerprint: {'; '.join(difference)} (now != then). "
            "Restore that environment, or start a new run with this directory as policy.path."
        )
    tensors = {}
    for name in (WEIGHTS, OPTIMIZER):
        file = path / name
        if not file.is_file() or _sha256(file) != state["sha256"].get(name):
            raise CheckpointError(f"{file} is missing, truncated or damaged (SHA-256). {_REMEDY}")
        tensors[name] = load_file(file)
    kept = {name: state[name] for name in _KEPT}
    return Checkpoint(path, state["step"], tensors[WEIGHTS], tensors[OPTIMIZER], **kept)


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model in place; CheckpointError, and nothing copied, on a misfit."""
    own = dict(model.named_parameters())
    shapes, given = ({k: (v.shape, v.dtype) for k, v in t.items()} for t in (own, weights))
    if misfits := sorted(n for n in own.keys() | weights.keys() if shapes.get(n) != given.get(n)):
        raise CheckpointError(
            f"the checkpoint does not fit the policy: {len(misfits)} tensors differ, the first is "
            f"{misfits[0]}. Use the recipe it was written with."
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def _weights(model: Any) -> dict[str, Tensor]:
    """Parameters by name; a tied parameter once, under its first name."""
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a readable checkpoint: {error}. Resume from another, or start again."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / STATE} is not of checkpoint format {FORMAT}; resume with the rl_consistency "
            "that wrote it."
        )
    if missing := sorted({"step", "fingerprint", *_KEPT, "sha256"} - state.keys()):
        raise CheckpointError(
            f"{path / STATE} is damaged: it lacks {', '.join(missing)}. {_REMEDY}"
        )
    return state


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(*paths: Path) -> None:
    """Wait until files and directories are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
