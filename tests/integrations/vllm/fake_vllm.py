"""Stub modules with the names and signatures of vLLM 0.26.0 that the plug-in touches, and steps as
its scheduler makes them."""

import enum
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import ClassVar, NamedTuple

import torch

VERSION = "0.26.0"
BLOCK_SIZE = 16


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


@dataclass
class CommonAttentionMetadata:
    """The fields of vLLM's that the plug-in reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


class LogprobsTensors(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: list[int] | None = None


SamplerOutput = make_dataclass(
    "SamplerOutput",
    [
        *("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled"),
        ("num_rejected", object, field(default=None)),
    ],
)


class _ModelRegistry:
    def __init__(self):
        self.models = {}

    def register_model(self, model_arch, model_cls):
        self.models[model_arch] = model_cls


ModelRegistry = _ModelRegistry()


class VerifyAndUpdateConfig:
    @staticmethod
    def verify_and_update_config(vllm_config):
        return

    @staticmethod
    def verify_and_update_model_config(model_config):
        return


def default_weight_loader(param, loaded_weight):
    assert param.size() == loaded_weight.size()
    param.data.copy_(loaded_weight)


class CuMemBackend:
    def suspend(self, level=1):
        """Unmaps memory."""

    def resume(self, tags=None):
        """Maps it."""


class SleepModeBackendFactory:
    _registry: ClassVar[dict] = {}

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        cls._registry[name] = lambda: getattr(sys.modules[module_path], class_name)

    @classmethod
    def create_backend(cls, model_config):
        return cls._registry[model_config.sleep_mode_backend]()()


_context = None


def get_forward_context():
    assert _context is not None
    return _context


@contextmanager
def forward_context(**fields):
    """vLLM's `set_forward_context`."""
    global _context
    _context = SimpleNamespace(**fields)
    try:
        yield
    finally:
        _context = None


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    chunked = seq_lens < prefill_len[idx_mapping]
    return num_sampled.masked_fill(chunked, 0), torch.zeros_like(num_sampled)


NAMES = {
    "vllm": {"__version__": VERSION},
    "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda fn: fn},
    "vllm.config": {"CUDAGraphMode": CUDAGraphMode},
    "vllm.device_allocator.sleep_mode_backend": {
        "CuMemBackend": CuMemBackend,
        "SleepModeBackendFactory": SleepModeBackendFactory,
    },
    "vllm.forward_context": {"get_forward_context": get_forward_context},
    "vllm.model_executor.layers.attention_layer_base": {
        "AttentionLayerBase": type("AttentionLayerBase", (), {})
    },
    "vllm.model_executor.model_loader.weight_utils": {
        "default_weight_loader": default_weight_loader
    },
    "vllm.model_executor.models.config": {
        "MODELS_CONFIG_MAP": {},
        "VerifyAndUpdateConfig": VerifyAndUpdateConfig,
    },
    "vllm.model_executor.models.registry": {"ModelRegistry": ModelRegistry},
    "vllm.v1.attention.backend": {
        "AttentionBackend": type("AttentionBackend", (), {"get_kv_cache_shape": None}),
        "AttentionCGSupport": AttentionCGSupport,
        "AttentionMetadataBuilder": AttentionMetadataBuilder,
    },
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
    "vllm.v1.outputs": {"LogprobsTensors": LogprobsTensors},
    "vllm.v1.worker.gpu.input_batch": {
        "get_num_sampled_and_rejected": get_num_sampled_and_rejected
    },
    "vllm.v1.worker.gpu.model_states.default": {
        "DefaultModelState": type("DefaultModelState", (), {})
    },
    "vllm.v1.worker.gpu.sample.output": {"SamplerOutput": SamplerOutput},
    "vllm.v1.worker.worker_base": {"WorkerBase": type("WorkerBase", (), {})},
}
"""Module -> its names. Another package's tests add theirs here."""

PLUGIN = "rl_consistency.integrations.vllm"


@contextmanager
def installed():
    """Inside the block `import vllm` finds the stubs; the plug-in is imported again, and what of it
    was there before comes back."""
    assert "vllm" not in sys.modules, "a vLLM is there already"
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if PLUGIN in name}
    ModelRegistry.models.clear()
    for name, values in NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = ModuleType(path)
                if end > 1:
                    setattr(
                        sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path]
                    )
        vars(sys.modules[name]).update(values)
    try:
        yield sys.modules["vllm"]
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "vllm" or PLUGIN in n]:
            del sys.modules[name]
        sys.modules.update(before)


def vllm_config(config, dtype, *, max_num_batched_tokens=1024, **changed):
    """What of `VllmConfig` the plug-in reads, at vLLM's defaults; `changed` are `section__name`."""
    sections = {
        "model_config": {
            **{"hf_config": config, "dtype": dtype, "max_model_len": 512, "quantization": None},
            **{"runner_type": "generate", "model_impl": "auto", "multimodal_config": None},
            **{"enable_prompt_embeds": False, "enable_return_routed_experts": False},
            **{"logits_processors": None, "enforce_eager": False},
            **{"logprobs_mode": "raw_logprobs", "sleep_mode_backend": "cumem"},
        },
        "parallel_config": {
            **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), 1),
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            **dict.fromkeys(("enable_expert_parallel", "enable_dbo"), False),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": BLOCK_SIZE,
            "kv_offloading_size": None,
        },
        "scheduler_config": {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": 256,
        },
        "load_config": {"load_format": "auto"},
        "compilation_config": {
            "static_forward_context": {},
            "cudagraph_capture_sizes": None,
            "max_cudagraph_capture_size": None,
        },
    }
    whole = dict.fromkeys(
        (
            *("quant_config", "lora_config", "speculative_config", "kv_transfer_config"),
            "weight_transfer_config",
        )
    )
    whole["use_v2_model_runner"] = True
    for name, value in changed.items():
        section, _, key = name.partition("__")
        (sections[section] if key else whole)[key or name] = value
    made = {name: SimpleNamespace(**fields) for name, fields in sections.items()}
    return SimpleNamespace(**made, **whole)


class Server:
    """vLLM's scheduler and runner, as far as the model sees them: steps of random chunks over a
    paged cache, padded as for a graph."""

    def __init__(self, model, sequences, *, seed=0, blocks=96, pad=(2, 3), keep=None):
        """`pad`: requests and tokens of padding; `keep`: a server whose cache this one goes on
        with, from where it is."""
        self.model, self.sequences, self.pad = model, sequences, pad
        if keep is not None:
            self.tables, self.width = keep.tables, keep.width
            self.computed = list(keep.computed)
            return
        self.random = random.Random(seed)
        free = list(range(1, blocks))  # 0 is the null block
        self.random.shuffle(free)
        needed = [-(-len(s) // BLOCK_SIZE) for s in sequences]
        self.width = max(needed)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        self.computed = [0] * len(sequences)
        for cache in model.caches:
            shape = cache.get_attn_backend().get_kv_cache_shape(
                blocks, BLOCK_SIZE, cache.kv_heads, cache.head_dim
            )
            cache.kv_cache = torch.zeros(shape, dtype=cache.dtype)

    @property
    def unfinished(self):
        return any(n < len(s) for n, s in zip(self.computed, self.sequences, strict=True))

    def take(self):
        """(sequence, tokens) of a random step, one-token ones first, as vLLM orders them."""
        sizes = 1, 1, 2, 7, 30, 200
        left = {i: len(s) - self.computed[i] for i, s in enumerate(self.sequences)}
        chosen = [
            (i, min(self.random.choice(sizes), n))
            for i, n in left.items()
            if n and self.random.random() < 0.7
        ]
        return sorted(chosen, key=lambda each: each[1])

    def metadata(self, chunks):
        """`CommonAttentionMetadata` of chunks, and the slots of padded tokens."""
        pad, _ = self.pad
        lens = [n for _, n in chunks] + [0] * pad
        ends = [self.computed[i] + n for i, n in chunks] + [0] * pad
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        tables = torch.zeros(len(lens), self.width, dtype=torch.int32)
        for row, (i, _) in enumerate(chunks):
            tables[row, : len(self.tables[i])] = torch.tensor(self.tables[i], dtype=torch.int32)
        ends = torch.tensor(ends, dtype=torch.int32)
        places = [(i, self.computed[i] + j) for i, n in chunks for j in range(n)]
        slots = [self.tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in places]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(lens),
            num_actual_tokens=len(places),
            max_query_len=max(lens),
            max_seq_len=int(ends.max()),
            block_table_tensor=tables,
            slot_mapping=torch.tensor(slots + [-1] * self.pad[1]),
        )
        return common, places

    def run(self, chunks, *, captured=False, **context):
        """Hidden states of a step's tokens, with (sequence, position) of each; padding cut off.
        `captured`: as vLLM runs a decode step for a graph."""
        common, places = self.metadata(chunks)
        tokens = [self.sequences[i][p] for i, p in places] + [0] * self.pad[1]
        positions = [p for _, p in places] + [0] * self.pad[1]
        names = self.model.names
        (spec,) = {cache.get_kv_cache_spec(self.model.vllm_config) for cache in self.model.caches}
        builder = (
            self.model.caches[0]
            .get_attn_backend()
            .get_builder_cls()(spec, names, self.model.vllm_config, torch.device("cpu"))
        )
        build = builder.build_for_cudagraph_capture if captured else partial(builder.build, 0)
        fields = {
            "attn_metadata": dict.fromkeys(names, build(common)),
            "slot_mapping": dict.fromkeys(names, common.slot_mapping),
            "cudagraph_runtime_mode": CUDAGraphMode.NONE,
        }
        with forward_context(**fields | context), torch.inference_mode():
            hidden = self.model(torch.tensor(tokens, dtype=torch.int32), torch.tensor(positions))
        for i, n in chunks:
            self.computed[i] += n
        return hidden[: len(places)], places
