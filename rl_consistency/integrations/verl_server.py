"""verl's vLLM servers with the patched model in them."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from rl_consistency.integrations.vllm import VARIABLE


class Server(vLLMHttpServer):
    """A server of the model that is trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.environ[VARIABLE] = "1"  # for the processes that vLLM starts
        super().__init__(*args, **kwargs)

    def _get_worker_extension_cls(self) -> str:
        return "rl_consistency.integrations.verl_rollout.WorkerExtension"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        if name := engine_kwargs.get("worker_extension_cls"):
            raise ValueError(
                f"rollout.engine_kwargs.vllm.worker_extension_cls={name!r} would replace the class "
                "that takes over the weights; leave it out."
            )
        super()._preprocess_engine_kwargs(engine_kwargs)


class Replica(vLLMReplica):
    """The servers of one copy of the model; those of reward and teacher models stay verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(Server)
