"""Where the first difference of a run begins, written beside its replay bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from rl_consistency.models.token_logprobs import Sampling
from rl_consistency.parity.localize import localize
from rl_consistency.parity.replay import LOCALIZATION
from rl_consistency.trainers.run_directory.unfinished import write_whole


def localized(
    model: nn.Module,
    bundle: Path,
    index: int,
    sequence: Sequence[int],
    prompt_length: int,
    sampling: Sampling,
) -> str:
    """Localize the `index`-th sequence of a bundle; a sentence for the message of the drift."""
    given = {"prompt_lengths": [prompt_length], "sampling": sampling, "ablation": False}
    try:
        found = localize(model, [sequence], **given)
    except (ValueError, RuntimeError) as error:  # shards, or no memory: the drift matters more
        return f"Sequence {index} was not localized ({error}). "
    write_whole(bundle / LOCALIZATION, json.dumps(found.as_record(), indent=1))
    if found.first is None:
        return f"Run again, both sides of sequence {index} are equal. "
    return f"Sequence {index} differs first in: {found.first} ({bundle / LOCALIZATION}). "
