"""A replay bundle: all that is needed to look again at tokens whose logprobs differed.

A bundle is a directory: `bundle.json` (tokens, prompt lengths, configuration, fingerprint, the
digest of the weights) and `logprobs.safetensors` (both sides, fp32, flat). Only the offending
sequences are kept, and the weights only as their digest: the run's checkpoints hold them. What else
lies there is for readers, and no part of its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rl_consistency.numerics.files import replace, unfinished
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.parity.drift import (
    DriftReport,
    Sample,
    compare_logprobs,
    mismatched_sequences,
    worst_tokens,
)

FORMAT = 1
FILES = ("bundle.json", "logprobs.safetensors")
LOCALIZATION = "localization.json"
"""What a run found at its first mismatch, beside the files of the bundle."""
TEXTS = "token_texts.json"
"""Token id -> text of the worst tokens, from a run that has a tokenizer; beside them too."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayBundle:
    """The offending sequences of one step, and where they came from."""

    sequences: list[list[int]]
    """Token ids, prompt first."""
    prompt_lengths: list[int]
    """Prompt tokens of each sequence."""
    sequence_indices: list[int]
    """The place of each sequence in the batch it was found in."""
    rollout_logprobs: list[Tensor]
    """fp32, one tensor per sequence."""
    training_logprobs: list[Tensor]
    """fp32, one tensor per sequence, as training recomputed them."""
    config: dict[str, Any]
    """The resolved configuration of the run."""
    parameter_digest: str
    """SHA-256 of the weights under which both sides ran."""
    fingerprint: dict[str, str]
    """Entries of the run's fingerprint."""
    fingerprint_digest: str

    @property
    def samples(self) -> list[Sample]:
        """Its completions; their prompt ids are `sequence_indices`."""
        sides = self.rollout_logprobs, self.training_logprobs
        parts = zip(self.sequences, self.prompt_lengths, self.sequence_indices, *sides, strict=True)
        return [Sample(ids[n:], (index, 0), *pair) for ids, n, index, *pair in parts]

    def drift(self) -> DriftReport:
        return compare_logprobs(self.rollout_logprobs, self.training_logprobs)


def save_replay_bundle(
    directory: str | os.PathLike[str],
    *,
    sequences: Sequence[Sequence[int]],
    rollout_logprobs: Sequence[Tensor],
    training_logprobs: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    config: Mapping[str, Any],
    parameter_digest: str,
    fingerprint: Fingerprint,
    decode: Callable[[list[int]], str] | None = None,
) -> Path:
    """Write the sequences whose logprobs differ as a new bundle, all or nothing; return its path.

    Args:
        directory: where bundles of the run go; made if missing. A bundle is named by its content,
            so that saving the same one again gives the same path.
        sequences: with the next three lists and the digest, as in `ReplayBundle`, but of all
            sequences of the batch.
        config: plain values, as JSON can hold them.
        fingerprint: of the run.
        decode: the text of token ids, for those of the worst tokens; None leaves texts out.

    Raises:
        ValueError: lists of different lengths, or nothing differs.
        TypeError: a configuration JSON cannot hold.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    sides = {"rollout": rollout_logprobs, "training": training_logprobs}
    given = {"sequences": sequences, "prompt lengths": prompt_lengths, **sides}
    if len({len(part) for part in given.values()}) > 1:
        found = ", ".join(f"{len(part)} {name}" for name, part in given.items())
        raise ValueError(f"got {found} logprobs; there must be one of each per sequence")
    offending = mismatched_sequences(rollout_logprobs, training_logprobs)
    if not offending:
        raise ValueError("no sequence differs: there is nothing to replay")
    content = {
        "format": FORMAT,
        "sequences": [list(map(int, sequences[i])) for i in offending],
        "prompt_lengths": [int(prompt_lengths[i]) for i in offending],
        "sequence_indices": offending,
        "lengths": [rollout_logprobs[i].numel() for i in offending],
        "config": dict(config),
        "parameter_digest": parameter_digest,
        "fingerprint": dict(fingerprint.entries),
        "fingerprint_digest": fingerprint.digest,
    }
    flat = {
        side: torch.cat([parts[i].detach().cpu().reshape(-1) for i in offending])
        for side, parts in sides.items()
    }
    text = json.dumps(content, indent=1).encode()
    files: dict[str, bytes] = {"bundle.json": text, "logprobs.safetensors": save(flat)}
    target = Path(directory) / _name(files)
    if decode is not None:
        parts = zip(*given.values(), strict=True)
        samples = [Sample(ids[n:], (0, 0), *pair) for ids, n, *pair in parts]
        worst = worst_tokens(samples, lambda ids: str(int(ids[0])))
        texts = {row.token: decode([int(row.token)]) for row in worst}
        files[TEXTS] = json.dumps(texts, indent=1).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_dir():
        with unfinished(target.parent) as place:
            for file, data in files.items():
                (place / file).write_bytes(data)
            replace(place, target)
    return target


def _name(files: Mapping[str, bytes]) -> str:
    return f"bundle-{hashlib.sha256(bytes(1).join(files.values())).hexdigest()[:16]}"


def load_replay_bundle(path: str | os.PathLike[str]) -> ReplayBundle:
    """Read a bundle back, bit for bit.

    Raises:
        FileNotFoundError: no bundle there.
        ValueError: a file is damaged or of another format, the two files disagree, or the directory
            was renamed: its name is the digest of its content.
    """
    path = Path(path)
    for file in FILES:
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path} is not a replay bundle: {file} is missing")
    files = {file: (path / file).read_bytes() for file in FILES}
    if (name := _name(files)) != path.resolve().name:
        raise ValueError(f"{path} is damaged or was renamed: its content is that of {name}")
    try:
        content = json.loads(files["bundle.json"])
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / 'bundle.json'} is not whole JSON ({error})") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path / 'bundle.json'} is not a replay bundle of format {FORMAT}")
    try:
        tensors = load(files["logprobs.safetensors"])
        lengths = content.pop("lengths")
        sides = {side: list(tensors[side].split(lengths)) for side in ("rollout", "training")}
        return ReplayBundle(
            rollout_logprobs=sides["rollout"], training_logprobs=sides["training"], **content
        )
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged ({error}); its two files do not agree") from error
