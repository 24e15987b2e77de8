"""vLLM's sleep mode, which throws memory away: weights at level 2, keys at any level.

vLLM keeps `named_buffers` at level 2. Rotary tables, attention's memory and graphs lie outside the
memory that sleeps, since they are made after the model was loaded.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

from rl_consistency.integrations.vllm.weights import watched

NAME = "rl_consistency"


class WatchedSleep(CuMemBackend):
    """vLLM's default backend of sleep mode; watched models learn what they lost."""

    def suspend(self, level: int = 1) -> None:
        super().suspend(level)
        for received in watched():
            received.asleep = True
            if level > 1:
                received.distrust("vLLM's sleep at level 2 threw them away")

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        for received in watched():
            received.asleep &= tags is not None and "weights" not in tags
            received.changed = True  # the keys are gone


def watch_sleep(model_config: Any) -> None:
    """Let vLLM sleep by `WatchedSleep`; ValueError on a backend other than vLLM's default."""
    if (given := model_config.sleep_mode_backend) not in ("cumem", NAME):
        raise ValueError(
            f"rl_consistency in vLLM: sleep_mode_backend {given!r} is not covered; use vLLM's "
            "default, 'cumem'."
        )
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, WatchedSleep.__name__)
    model_config.sleep_mode_backend = NAME
