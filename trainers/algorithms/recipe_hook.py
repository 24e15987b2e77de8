"""The consistency hook as a recipe asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.hooks import ConsistencyHook


def hook_of(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    expected: Fingerprint,
    replay_dir: Path | None,
    warn: Callable[[str], None],
) -> ConsistencyHook:
    """Around a patched model; `expected` is the rollout's fingerprint."""
    return ConsistencyHook(
        model,
        **config.consistency.of_the_hook(),
        metrics_of=config.tracking.metrics_of,
        micro_batch_size=config.training.micro_batch_size,
        replay_dir=replay_dir,
        config=config.model_dump(mode="json"),
        decode=tokenizer.decode,
        expected_fingerprint=expected,
        warn=warn,
    )
