"""What the sampled audit of library products means for an engine."""

from __future__ import annotations

import warnings

from rl_consistency.kernels.matmul.cublaslt import schedule_audit


class LibraryAudit:
    """Follows which library products lost their certificate in this process, whoever reads the
    audit first.

    Graphs captured before one was struck may replay it, and keys cached before may be its work:
    neither may be used once the answer has changed.
    """

    def __init__(self) -> None:
        self._struck = tuple(schedule_audit().struck)

    def look(self) -> tuple[str, ...]:
        """The products struck so far, in order. Waits for the devices.

        Warns of those struck since the last look. It is no error: whoever trains on the samples
        decides whether a run goes on (`consistency.on_drift`).
        """
        before, self._struck = self._struck, tuple(schedule_audit().struck)
        new = [name for name in self._struck if name not in before]
        if new:
            warnings.warn(
                "sampled library matrix products differ from the canonical order; withdrawn: "
                f"{', '.join(new)}. They are not used again, and the engine drops its graphs and "
                "cached keys, but tokens drawn and logprobs computed since the last rollout began "
                "may have other bits: draw them anew, and continue training from a checkpoint made "
                "before.",
                stacklevel=2,
            )
        return self._struck
