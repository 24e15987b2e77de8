"""Both ends of verl's way from the trainer to vLLM's workers: what may sample, and its weights."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rl_consistency.integrations.verl_refusals import SAMPLED, refuse
from rl_consistency.integrations.verl_weights import compare_digests, take_digests
from rl_consistency.numerics.errors import ConsistencyError


class Adapter(ServerAdapter):
    """The trainer's end."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(SAMPLED, rollout=config)
        super().__init__(config, *args, **kwargs)


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's calls of a vLLM worker, whose model is patched. vLLM mixes the class into its own."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: Any = None) -> None:
        """Rules out no id: training scores those beyond the tokenizer's too, which verl would rule
        out here. ConsistencyError where vLLM has not made the patched model."""
        from rl_consistency.integrations.vllm.model import CanonicalForCausalLM

        model = self.model_runner.get_model()
        if not isinstance(model, CanonicalForCausalLM):
            raise ConsistencyError(
                f"vLLM made a {type(model).__name__} and not the patched model; let VLLM_PLUGINS "
                "name rl_consistency, or leave it unset."
            )
        if banned_token_ids:
            raise ValueError("models of images are not covered; train one of text.")

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take over the trainer's weights; ConsistencyError if the model has other bits then."""
        model, errors, digests = self.model_runner.get_model(), list[Exception](), dict[str, str]()

        def load(bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
            weights = dict(bucket)
            digests.update(take_digests(weights))
            try:
                model.load_weights(weights.items())
            except (ValueError, TypeError, RuntimeError) as error:
                errors.append(error)  # the sender would wait for its answer for ever

        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm)
        receiver.receive_weights(on_bucket_received=load)
        for error in errors:
            raise error
        compare_digests(digests, model.digests())
