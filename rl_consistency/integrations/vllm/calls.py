"""What a trainer asks each worker of vLLM by name, over `collective_rpc` or /collective_rpc."""

from __future__ import annotations

from typing import Any

CALLS: dict[str, Any] = {
    "rl_consistency_fingerprint": lambda worker: worker.get_model().fingerprint(),
    "rl_consistency_digest": lambda worker: worker.get_model().digest(),
    "rl_consistency_digests": lambda worker: worker.get_model().digests(),
}
FINGERPRINT, DIGEST, DIGESTS = CALLS


def add_calls() -> None:
    """Give all classes of vLLM's workers these methods, which a stock worker has not."""
    from vllm.v1.worker.worker_base import WorkerBase  # pyright: ignore[reportMissingImports]

    for name, call in CALLS.items():
        setattr(WorkerBase, name, call)
