"""Checkpoints: a model directory that also holds what a run needs to continue bit for bit.

    checkpoints/step_000030/
        config.json, model.safetensors, tokenizer files     loadable by from_pretrained
        optimizer.safetensors                               moments and master weights
        critic.safetensors, critic_optimizer.safetensors    the same of a critic, in PPO
        trainer.json                                        step, schedule, totals, fingerprint,
                                                            SHA-256 of itself and of all others

A checkpoint is written under a name of its own, flushed, and renamed at the end: an interrupt or a
full disk leaves the previous one whole. Loading it runs none of its files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_consistency.numerics.files import discard, file_digest, replace, seal, unfinished, unseal
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.trainers.run_directory.manifest import (
    is_written,
    listed,
    put_on_list,
    put_own,
    state_of,
    strangers_in,
)

FORMAT = 3
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "trainer.json"
_TENSORS = ("optimizer", "critic", "critic_optimizer")  # beside the weights
_REMEDY = "Remove this checkpoint directory and resume from the one before it."
REWARD_FUNCTION = "reward function"
"""What the names of entries begin with that hold digests of reward functions."""
_OTHER_REWARD = "set reward.accept_changed=true to go on with the changed function, "


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
    critic: dict[str, Tensor] | None = None
    """Weights; None without a critic."""
    critic_optimizer: dict[str, Tensor] | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    """What the recipe says otherwise now and may: `key`, `old` and `new` of each."""


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    schedule: Mapping[str, Any],
    totals: Mapping[str, Any],
    extra: Mapping[str, Any],
    fingerprint: Fingerprint,
    keep: int,
    **tensors: Mapping[str, Tensor],
) -> Path:
    """Write `directory/step_NNNNNN`, which must not exist; remove all but the newest `keep`.

    `tensors` are those of the optimizer and, with one, of critic and critic_optimizer. What is
    behind a link stays, and so does what `strangers` finds somebody else's hand in.
    CheckpointError, and nothing changed, where it cannot be written.
    """
    target = directory / checkpoint_name(step)
    with explained(f"the checkpoint {target}", lambda: remedy(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished(directory) as place:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(place)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(place)
            tokenizer.save_pretrained(place)
            save_file(_plain(model.named_parameters()), place / WEIGHTS, metadata={"format": "pt"})
            for name, parts in tensors.items():
                save_file(_plain(parts), place / f"{name}.safetensors")
            files = sorted(file for file in place.rglob("*") if file.is_file())
            state = {
                "format": FORMAT,
                "step": step,
                "schedule": dict(schedule),
                "totals": dict(totals),
                "extra": dict(extra),
                "fingerprint": fingerprint.entries,
                "files": {str(file.relative_to(place)): file_digest(file) for file in files},
                "marks": {str(file.relative_to(place)): _mark(file) for file in files},
            }
            text = seal(state).encode()
            (place / STATE).write_bytes(text)
            put_on_list(directory.parent, {_listed_as(target): [state_of(text)]})
            replace(place, target)
    if not directory.is_symlink():
        ours = [path for path in list_checkpoints(directory) if not strangers(path)]
        for old in ours[:-keep]:
            discard(old)
            put_on_list(directory.parent, {_listed_as(old): []})
    return target


def _listed_as(path: Path) -> str:
    """The name of a checkpoint in the manifest of its run."""
    return f"{path.parent.name}/{path.name}/{STATE}"


def _mark(file: Path) -> list[int]:
    """What no write into a file leaves as it is. Reading gigabytes again would take minutes."""
    found = file.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def save_weights(file: Path, model: Any) -> str:
    """Write a model's parameters to one file, whole or not at all (then a CheckpointError), and
    return its SHA-256."""
    with explained(str(file), lambda: remedy(file.parent)), unfinished(file.parent) as place:
        written = place / file.name
        save_file(_plain(model.named_parameters()), written, metadata={"format": "pt"})
        return put_own(written, file)["sha256"]


def read_weights(file: Path, digest: str) -> dict[str, Tensor]:
    """What `save_weights` wrote; CheckpointError if it is missing or has another SHA-256."""
    if not file.is_file() or file_digest(file) != digest:
        problem = "is missing, damaged or of another run (SHA-256)"
        raise CheckpointError(f"{file} {problem}: restore it, or begin another run.")
    return load_file(file)


@contextmanager
def explained(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Say what helps where a failing disk does not take what the block writes."""
    try:
        yield
    except BaseException as error:
        # tokenizers reports a failed write as a bare Exception.
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise CheckpointError(f"cannot write {what}: {error}. {remedy()}") from error
        raise


def remedy(directory: Path) -> str:
    """What helps a run that a full disk stopped, its checkpoints being in `directory`."""
    if list_checkpoints(directory):
        return "Earlier checkpoints are whole: free some space, then resume the run."
    other = "free some space, or set run.output_dir to another disk"
    return f"There is no checkpoint yet: {other}, and begin again with overwrite."


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; leftovers of an interrupted write are not listed."""
    steps = {path.name.removeprefix("step_"): path for path in directory.glob("step_*")}
    complete = [step for step in steps if step.isdecimal() and (steps[step] / STATE).is_file()]
    return [steps[step] for step in sorted(complete, key=int)]


def load_checkpoint(
    path: Path,
    fingerprint: Fingerprint,
    *,
    accepted: str | None = None,
    changeable: Sequence[str] = (),
) -> Checkpoint:
    """Read a checkpoint; CheckpointError on damaged files, another fingerprint or another name.

    Entries of the fingerprint whose names begin with `accepted`, or are `changeable`, may differ.
    """
    state = _read_state(path)
    if path.name != (name := checkpoint_name(state["step"])):
        held = f"{path} holds the checkpoint of step {state['step']}"
        raise CheckpointError(f"{held}: rename it to {name}, or move it out of {path.parent}.")
    now, then = fingerprint.entries, state["fingerprint"]
    found = fingerprint.difference(Fingerprint(then))
    free = (*(f"{key}: " for key in changeable), *([accepted] if accepted else []))
    if difference := [line for line in found if not line.startswith(free)]:
        mended = all(line.startswith(REWARD_FUNCTION) for line in difference)
        raise CheckpointError(
            f"{path} was written under another fingerprint: {'; '.join(difference)} (now != then). "
            f"Restore what was then, {_OTHER_REWARD if mended else ''}or start a new run with this "
            "directory as policy.path."
        )
    for name, digest in state["files"].items():
        file = path / name
        if not file.is_file() or file_digest(file) != digest:
            raise CheckpointError(f"{file} is missing, truncated or damaged (SHA-256). {_REMEDY}")
    given = {name: path / f"{name}.safetensors" for name in _TENSORS}
    tensors = {name: load_file(file) for name, file in given.items() if file.name in state["files"]}
    kept = {name: state[name] for name in ("schedule", "totals", "extra")}
    known = [key for key in changeable if key in now and key in then and now[key] != then[key]]
    changes = tuple(
        {"key": key, "old": json.loads(then[key]), "new": json.loads(now[key])} for key in known
    )
    weights = load_file(path / WEIGHTS)
    return Checkpoint(path, state["step"], weights, **tensors, **kept, changes=changes)


def strangers(path: Path) -> list[Path]:
    """What is not ours to remove: what in a checkpoint is not listed there or was changed since, or
    `path` itself where it is no checkpoint of this run, or a copy under another name."""
    try:
        state = _read_state(path)
    except CheckpointError:
        return [path]
    known = listed(path.parents[1])
    if path.is_symlink() or path.name != checkpoint_name(state["step"]):
        return [path]
    if known is not None and not is_written(path / STATE, known.get(_listed_as(path), [])):
        return [path]

    def is_ours(file: Path) -> bool:
        name = str(file.relative_to(path))
        if file == path / STATE:
            return True
        marked = state.get("marks", {}).get(name) == _mark(file)
        return name in state["files"] and (marked or file_digest(file) == state["files"][name])

    return strangers_in(path, is_ours)


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model, or into tensors by name, in place; CheckpointError, and nothing
    copied, on a misfit."""
    own = dict(model) if isinstance(model, Mapping) else dict(model.named_parameters())
    shapes, given = ({k: (v.shape, v.dtype) for k, v in t.items()} for t in (own, weights))
    if misfits := sorted(n for n in own.keys() | weights.keys() if shapes.get(n) != given.get(n)):
        found = f"{len(misfits)} tensors differ, the first is {misfits[0]}"
        raise CheckpointError(f"the checkpoint does not fit the policy: {found}. Use its recipe.")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step_{step:06d}"


def _plain(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in dict(tensors).items()}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = unseal(path / STATE)
    except ValueError as error:
        raise CheckpointError(f"{error}. {_REMEDY}") from error
    if state.get("format") != FORMAT:
        remedy = "resume with the rl_consistency that wrote it"
        raise CheckpointError(f"{path / STATE} is not of checkpoint format {FORMAT}: {remedy}.")
    return state


def capture() -> dict[str, Any]:
    """The random states as plain values that survive JSON."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": None if cuda is None else bytes(cuda.tolist()).hex(),
    }


def restore(state: Mapping[str, Any]) -> None:
    """Set the states to what `capture` gave."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    for name, put in {"torch": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}.items():
        if state[name] is not None:
            put(torch.tensor(list(bytes.fromhex(state[name])), dtype=torch.uint8))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all of them inside the block; their states from before come back at its end."""
    before = capture()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        restore(before)
