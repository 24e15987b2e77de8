"""What the sampled audit of library products means for rollouts."""

from __future__ import annotations

import warnings

from rl_consistency.kernels.cublaslt import schedule_audit


def struck_products() -> tuple[str, ...]:
    """Read the audit; the library products that lost their certificate in this process, in order.

    Graphs captured before one was struck may replay it, and keys cached before may be its work:
    neither may be used once the answer has changed. Waits for the devices.

    Warns if the audit found a difference that nobody has read of yet. It is no error: whoever
    trains on the samples decides whether a run goes on (`consistency.on_drift`).
    """
    report = schedule_audit()
    if report.found:
        warnings.warn(
            f"library matrix products differ from the canonical order in {report.found} elements "
            f"sampled since the last look ({report.audited} of {report.calls} calls were sampled "
            f"so far); withdrawn: {', '.join(report.struck)}. They are not used again, and the "
            "engine drops its graphs and cached keys, but tokens drawn and logprobs computed since "
            "then may have other bits: draw them anew, and continue training from a checkpoint "
            "made before.",
            stacklevel=2,
        )
    return tuple(report.struck)
