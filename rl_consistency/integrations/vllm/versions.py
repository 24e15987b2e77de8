"""Which releases of vLLM are covered, and what differs between them."""

from __future__ import annotations

from importlib.metadata import version

COVERED = ("0.26.0",)
"""Releases whose names and signatures were compared with what this package uses."""


def require_covered() -> None:
    """ValueError unless the installed vLLM is a covered release."""
    found = version("vllm")
    if found not in COVERED:
        raise ValueError(
            f"vLLM {found} is installed; rl_consistency covers {', '.join(COVERED)}, because it "
            f"uses names inside vLLM that change. Install one: pip install vllm=={COVERED[-1]}."
        )
