"""vLLM whose models are the patched ones: its logprobs are then the bits that training computes.

The entry point of the group `vllm.general_plugins`, which vLLM calls in each of its processes. It
does nothing unless RL_CONSISTENCY_VLLM=1.
"""

from __future__ import annotations

import os

VARIABLE = "RL_CONSISTENCY_VLLM"
_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Names of variables, by commas, that vLLM's Ray workers get from the process that starts them."""

_OFF, _ON = ("", "0"), "1"


def register() -> None:
    """Give vLLM the patched models in the place of its own, in this process; may run several times.

    ValueError on another value of the variable, and on a vLLM that is not covered.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in _OFF:
        return
    if asked != _ON:
        raise ValueError(
            f"{VARIABLE}={asked!r}; 1 turns the plug-in on, 0 or nothing leaves it off."
        )
    from rl_consistency.integrations.vllm.versions import require_covered

    require_covered()
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    copied = [name for name in os.environ.get(_COPIED, "").split(",") if name.strip() != VARIABLE]
    os.environ[_COPIED] = ",".join([*filter(None, copied), VARIABLE])
    from rl_consistency.integrations.vllm.calls import add_calls
    from rl_consistency.integrations.vllm.model import register_models

    add_calls()
    register_models()
