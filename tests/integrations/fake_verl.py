"""verl where it is not installed: the names and signatures of 0.9.1 that the integration uses.

`test_verl_engine.py` compares the signatures with verl's own where that is installed.
"""

import sys
from itertools import accumulate
from types import ModuleType
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM


class EngineRegistry:
    engines: ClassVar = {}

    @classmethod
    def register(cls, model_type, backend, device="cuda", vendor=None):
        def decorator(engine_class):
            cls.engines |= {(model_type, name, device, vendor): engine_class for name in backend}
            return engine_class

        return decorator


class FSDPEngineWithLMHead:
    """verl's loop over micro-batches, without shards."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config, self.engine_config = model_config, engine_config
        self._autocast_dtype = torch.bfloat16

    def initialize(self):
        self.module = self._build_fsdp_module(self._build_module())

    def _build_module(self):
        config = self.model_config
        path = config.local_path
        return AutoModelForCausalLM.from_pretrained(path, config=config.hf_config, dtype="bfloat16")

    def _build_fsdp_module(self, module):
        return module

    def get_data_parallel_group(self):
        return None

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        found = []
        for micro_batch in data.parts(data["micro_batch_size_per_gpu"]):
            with torch.set_grad_enabled(not forward_only):
                loss, output = self.forward_step(micro_batch, loss_function, forward_only)
            if not forward_only:
                loss.backward()
            found.append(output)
        return found

    def forward_step(self, micro_batch, loss_function, forward_only):
        raise NotImplementedError

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        raise NotImplementedError


class RolloutReplicaRegistry:
    loaders: ClassVar = {}

    @classmethod
    def register(cls, name, loader):
        cls.loaders[name] = loader


class ServerAdapter:
    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        self.config = config


class BucketedWeightReceiver:
    """Gives the buckets of `sent`; tells whether the sender has got its answers."""

    sent, answered = [], False

    def __init__(self, zmq_handle, device, use_shm=False):
        self.handle = zmq_handle

    def receive_weights(self, on_bucket_received):
        for index, bucket in enumerate(type(self).sent):
            on_bucket_received(bucket, index == len(type(self).sent) - 1)
        type(self).answered = True


class vLLMColocateWorkerExtension:
    def monkey_patch_model(self, vocab_size, banned_token_ids=None):
        raise NotImplementedError

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        raise NotImplementedError

    def _get_zmq_handle(self):
        return "ipc:///nowhere"


class vLLMHttpServer:
    def __init__(
        self,
        config,
        model_config,
        rollout_mode,
        workers,
        replica_rank,
        node_rank,
        gpus_per_node,
        nnodes,
        cuda_visible_devices,
        disaggregation_role="null",
        disaggregation_kv_transfer_config=None,
    ):
        self.config = config

    def _get_worker_extension_cls(self):
        return "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"

    def _preprocess_engine_kwargs(self, engine_kwargs):
        engine_kwargs["seen"] = True


class vLLMReplica:
    def __init__(
        self,
        replica_rank,
        config,
        model_config,
        gpus_per_node=8,
        is_reward_model=False,
        is_teacher_model=False,
        name_suffix="",
    ):
        self.is_reward_model, self.is_teacher_model = is_reward_model, is_teacher_model
        self.server_class = vLLMHttpServer


NAMES = {
    "verl": {"__version__": "0.9.1"},
    "verl.utils.device": {
        "get_device_id": lambda: torch.device("cpu"),
        "get_device_name": lambda: "cpu",
        "get_vendor": lambda: "nvidia",
    },
    "verl.utils.tensordict_utils": {
        "get_non_tensor_data": lambda data, key, default: data.get(key, default)
    },
    "verl.workers.engine": {"EngineRegistry": EngineRegistry},
    "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": FSDPEngineWithLMHead},
    "verl.workers.engine.utils": {"detach_tree": lambda tree: tree},
    "verl.workers.rollout": {},
    "verl.workers.rollout.base": {"_ROLLOUT_REGISTRY": {}},
    "verl.workers.rollout.replica": {"RolloutReplicaRegistry": RolloutReplicaRegistry},
    "verl.workers.rollout.vllm_rollout": {"ServerAdapter": ServerAdapter},
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": {
        "BucketedWeightReceiver": BucketedWeightReceiver
    },
    "verl.workers.rollout.vllm_rollout.utils": {
        "vLLMColocateWorkerExtension": vLLMColocateWorkerExtension
    },
    "verl.workers.rollout.vllm_rollout.vllm_async_server": {
        "vLLMHttpServer": vLLMHttpServer,
        "vLLMReplica": vLLMReplica,
    },
    "ray": {"remote": lambda cls: ("remote", cls)},
}
"""Modules -> what the integration takes from them."""

OURS = ("verl", "verl_rollout", "verl_server")


def install(monkeypatch):
    """Put the modules in the place of verl's, until the test ends."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "verl" or name in [
            f"rl_consistency.integrations.{n}" for n in OURS
        ]:
            monkeypatch.delitem(sys.modules, name)
    rollouts = dict.fromkeys([("vllm", "async"), ("sglang", "async"), ("trtllm", "async")], "stock")
    monkeypatch.setitem(NAMES["verl.workers.rollout.base"], "_ROLLOUT_REGISTRY", rollouts)
    EngineRegistry.engines.clear()
    RolloutReplicaRegistry.loaders.clear()
    for path, names in NAMES.items():
        parents = list(accumulate(path.split("."), "{}.{}".format))
        for parent in parents:
            if parent not in sys.modules or parent == path:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        vars(sys.modules[path]).update(names)
    for path in [name for name in sys.modules if name.startswith("verl.")]:
        parent, _, leaf = path.rpartition(".")
        setattr(sys.modules[parent], leaf, sys.modules[path])


class Batch(dict):
    """A TensorDict's names: jagged tensors, and options as they are."""

    def to(self, device):
        return self

    def parts(self, size):
        jagged = {k: v.unbind() for k, v in self.items() if getattr(v, "is_nested", False)}
        count = len(jagged["input_ids"])
        for start in range(0, count, size):
            cut = {k: nested(v[start : start + size]) for k, v in jagged.items()}
            yield Batch(self | cut)


def nested(tensors):
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)
