"""TRL's own vLLM under `attach(trainer, rollout="vllm")`: what it has to run, and each weight sync.

Its workers have to run the plug-in (`integrations/vllm`), and are asked by the calls of
`vllm/calls.py`: those of an LLM in this process by `collective_rpc`, those of a server at
/collective_rpc, a route of the development mode that TRL's weight sync needs too.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import broadcast_object_list

from rl_consistency.integrations.refusals import check_same_model, setting
from rl_consistency.integrations.vllm.calls import DIGEST, DIGESTS, FINGERPRINT
from rl_consistency.integrations.vllm.weights import check_sync
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint

_START = {
    "colocate": "the trainer builds it, so set RL_CONSISTENCY_VLLM=1 before the trainer is built",
    "server": "start it with RL_CONSISTENCY_VLLM=1 and VLLM_SERVER_DEV_MODE=1 in its environment",
}
_SETTINGS = {
    "parallel_config.tensor_parallel_size": ("1", "sums over ranks have no order"),
    "parallel_config.data_parallel_size": ("1", "only the first engine answers"),
    "model_config.logprobs_mode": ("processed_logprobs", "tokens are drawn from those"),
}
"""Settings of vLLM -> the value that is covered, and why."""


class VLLMSync:
    """The vLLM of a trainer, asked whether it computes what training does.

    Every process has one and calls it at the same places; of a server, the first one asks and
    tells the others."""

    def __init__(self, trainer: Any, policy: Any) -> None:
        self._trainer, self._policy = trainer, policy
        self._backend = trainer.vllm_generation
        self._stock_sync, self._mode = self._backend.sync_weights, self._backend.mode
        self._is_server = self._mode == "server"
        self._name = "the vLLM server" if self._is_server else "the colocated vLLM"

    def check(self) -> None:
        """ValueError naming a stock vLLM, or a setting of it that is not covered. ConsistencyError
        naming what differs between its process and this one."""
        workers = self._call(FINGERPRINT)
        if self._is_server:
            asked = {"config_format": "json"}
            config = self._ask("GET", "server_info", params=asked)["vllm_config"]
        else:
            config = self._backend.llm.llm_engine.vllm_config
        dtype = str(next(self._policy.parameters()).dtype)
        settings = _SETTINGS | {"model_config.dtype": (dtype, "training has this one")}
        for path, (allowed, why) in settings.items():
            if (found := str(setting(config, path))) != allowed:
                raise ValueError(f"{self._name} has {path}={found}; set {allowed}: {why}.")
        ours = fingerprint(self._policy.device)
        for theirs in workers:
            if differing := ours.difference(Fingerprint(theirs)):
                which = f"the trainer and {self._name} differ, the trainer first"
                raise ConsistencyError(f"{which}: {'; '.join(differing)}")

    def sync_weights(self) -> None:
        """TRL's weight sync. ConsistencyError if a worker has other weights after it, naming the
        first, or keeps cached keys."""
        check_same_model(self._trainer, self._policy)
        self._stock_sync()
        check_sync(self._call(DIGEST), self._policy, lambda: self._call(DIGESTS))
        if self._is_server:  # once more: TRL does not read whether it was emptied
            emptied = self._ask("POST", "reset_prefix_cache")["success"]
        else:
            emptied = self._backend.llm.reset_prefix_cache()
        if not emptied:
            why = "which it does while requests run; let no other client send it any"
            raise ConsistencyError(f"{self._name} kept cached keys of the old weights, {why}")

    def _call(self, method: str) -> list[Any]:
        """What each worker answers."""
        if self._is_server:
            return self._ask("POST", "collective_rpc", json={"method": method})["results"]
        try:
            return self._backend.llm.collective_rpc(method)
        except NotImplementedError as error:  # vLLM's, of a worker without the method
            raise ValueError(self._stock(str(error))) from error

    def _ask(self, verb: str, route: str, **content: Any) -> Any:
        """The server's answer, in every process."""
        answers: list[Any] = [None]
        if self._trainer.accelerator.is_main_process:
            import requests  # as TRL's client, whose session asks an erring server for 10 s

            url = f"{self._backend.vllm_client.base_url}/{route}"
            answer = requests.request(verb, url, timeout=self._backend.server_timeout, **content)
            if not answer.ok:
                raise ValueError(self._stock(f"{url}: {answer.status_code} {answer.text[:300]}"))
            answers = [answer.json()]
        broadcast_object_list(answers, from_process=0)
        return answers[0]

    def _stock(self, found: str) -> str:
        return (
            f"{self._name} does not run the plug-in of rl_consistency ({found}); "
            f"{_START[self._mode]}, and vllm_model_impl is not 'transformers'."
        )
