"""Which releases of vLLM are covered, and what differs between them.

0.26 asks a backend for the shape of a cache. Later ones lay it out by themselves as [blocks, heads,
tokens, 2 D], and bind it to a layer by a method.
"""

from __future__ import annotations

from importlib.metadata import version

RUN = ("0.26.0",)
"""Releases that were run on a GPU."""

READ = ("0.31.0", "0.33.0")
"""Releases whose names and signatures alone were compared with what this package uses."""


def require_covered() -> None:
    """ValueError unless the installed vLLM is a covered release."""
    found = version("vllm").partition("+")[0]
    if found not in (*RUN, *READ):
        raise ValueError(
            f"vLLM {found} is installed; rl_consistency covers {', '.join((*RUN, *READ))}, because "
            f"it uses names inside vLLM that change. Install one: pip install vllm=={RUN[-1]}."
        )
