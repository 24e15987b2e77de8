"""vLLM 0.26.0's SamplingParams, its sampler, and where requests come in."""

import copy
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch

from tests.integrations.vllm import fake_vllm

DEFAULTS: Mapping[str, object] = {
    **{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": []},
    **{"stop_token_ids": [], "ignore_eos": False, "max_tokens": 16, "min_tokens": 0},
    **dict.fromkeys(("logprobs", "prompt_logprobs", "logprob_token_ids")),
    **{"flat_logprobs": False, "detokenize": True, "skip_special_tokens": True},
    **{"spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"output_kind": 0, "skip_clone": False, "output_text_buffer_length": 0},
    **{"_eos_token_id": None, "_all_stop_token_ids": set(), "structured_outputs": None},
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "extra_args")),
    **{"routed_experts_prompt_start": 0, "bad_words": [], "_bad_words_token_ids": None},
    **{"skip_reading_prefix_cache": False, "thinking_token_budget": None},
    "repetition_detection": None,
}
"""Each field of the class, in its order, with the value after `__post_init__`."""


class SamplingParams:
    """A msgspec.Struct's interface, without vLLM's checks."""

    __struct_fields__ = tuple(DEFAULTS)

    def __init__(self, **given):
        vars(self).update(copy.deepcopy(dict(DEFAULTS)) | given)

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None

    @staticmethod
    def for_sampler_warmup():
        return SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=50,
            min_p=0.1,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=2,
            logit_bias={0: -1.0, 1: 0.5},
            _bad_words_token_ids=[[0], [1, 2]],
            logprobs=5,
            prompt_logprobs=1,
        )


class InputProcessor:
    """The front end: clones what it is given."""

    def process_inputs(self, request_id, prompt, params, *, lora_request=None):
        params = copy.copy(params) if params.skip_clone else copy.deepcopy(params)
        return request_of(params, lora_request=lora_request)


def request_of(sampling_params, **fields):
    """An EngineCoreRequest."""
    usual = dict.fromkeys(("lora_request", "prompt_embeds", "mm_features"))
    return SimpleNamespace(sampling_params=sampling_params, **usual | fields)


class EngineCore:
    def preprocess_add_request(self, request):
        return request, 0


SEAMS = {
    (InputProcessor, "process_inputs"): InputProcessor.process_inputs,
    (EngineCore, "preprocess_add_request"): EngineCore.preprocess_add_request,
}
"""As vLLM has them; `register` replaces them."""


def children(params):
    """As `ParentRequest` makes them, and msgpack carries them."""
    for index in range(params.n):
        child = copy.copy(params)
        child.n = 1
        if params.seed is not None:
            child.seed = params.seed + index
        yield copy.deepcopy(child)


class BaseSampler:
    """vLLM's sampler, as far as it is read; it applies nothing."""

    compute_nans = False

    def __init__(self, slots, vocabulary):
        seeds = SimpleNamespace(np=np.zeros(slots, dtype=np.int64))
        self.counts = np.full(slots, -1)
        self.sampling_states = SimpleNamespace(
            max_num_reqs=slots,
            vocab_size=vocabulary,
            seeds=seeds,
            max_num_logprobs=lambda on_host: int(self.counts[on_host].max()),
        )
        lengths = SimpleNamespace(gpu=torch.zeros(slots, dtype=torch.int32))
        self.req_states = SimpleNamespace(device=torch.device("cpu"), prefill_len=lengths)
        self.penalties_state = object()

    def add_request(self, slot, prompt_len, params):
        seed = params.seed
        low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        self.sampling_states.seeds.np[slot] = np.random.randint(low, high) if seed is None else seed
        k = params.logprobs
        self.counts[slot] = {None: -1, -1: self.sampling_states.vocab_size}.get(k, k)
        self.req_states.prefill_len.gpu[slot] = prompt_len

    def apply_staged_writes(self):
        pass


def batch_of(slots, lengths):
    """An InputBatch of requests in slots, of so many tokens each, the last of which samples."""
    on_host = np.array(slots, dtype=np.int32)
    mapping, count = torch.from_numpy(on_host), len(slots)
    positions = torch.tensor(lengths, dtype=torch.int64) - 1
    return SimpleNamespace(
        num_reqs=count,
        idx_mapping=mapping,
        idx_mapping_np=on_host,
        expanded_idx_mapping=mapping,
        positions=torch.cat([torch.tensor([777]), positions]),
        logits_indices=torch.arange(1, count + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        cu_num_logits=torch.arange(count + 1, dtype=torch.int32),
    )


fake_vllm.NAMES |= {
    "vllm.sampling_params": {"SamplingParams": SamplingParams},
    "vllm.v1.engine.core": {"EngineCore": EngineCore},
    "vllm.v1.engine.input_processor": {"InputProcessor": InputProcessor},
}
