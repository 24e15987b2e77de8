"""What the plug-in sets in vLLM's configuration, and what it refuses by name."""

from types import SimpleNamespace

import pytest
import torch

from rl_consistency.verify.presets import preset_config
from tests.integrations.vllm.fake_vllm import vllm_config


@pytest.fixture
def settings():
    from rl_consistency.integrations.vllm import settings

    return settings


def configured(settings, preset="tiny-qwen3", **changed):
    given = vllm_config(preset_config(preset), torch.bfloat16, **changed)
    settings.CanonicalConfig.verify_and_update_model_config(given.model_config)
    settings.CanonicalConfig.verify_and_update_config(given)
    return given


def test_a_user_who_gives_nothing_gets_graphs_for_all_steps(settings):
    given = configured(settings, max_num_batched_tokens=8192, scheduler_config__max_num_seqs=96)
    sizes = given.compilation_config.cudagraph_capture_sizes
    assert sizes == sorted(set(sizes)) and sizes[:5] == [1, 2, 4, 8, 16] and sizes[-1] == 8192
    assert 96 in sizes and len(sizes) < 48
    assert given.model_config.logprobs_mode == "processed_logprobs"


def test_prompts_beyond_what_a_graph_is_faster_for_are_not_captured(settings):
    """Qwen3-8B: a step of 2,048 tokens takes the GPU longer than the host."""
    sizes = settings.capture_sizes(preset_config("qwen3-8b"), 16384, 256)
    assert 1500 < sizes[-1] < 2500 and 256 in sizes


def test_rows_of_experts_count_what_one_row_meets(settings):
    dense, sparse = preset_config("tiny-qwen3"), preset_config("tiny-olmoe")
    assert settings.row_parameters(dense) == 96 * (32 * 12 + 3 * 208)
    width = sparse.intermediate_size * sparse.num_experts_per_tok
    heads = 2 * (sparse.num_attention_heads + sparse.num_key_value_heads)
    head_dim = sparse.hidden_size // sparse.num_attention_heads
    expected = sparse.hidden_size * (head_dim * heads + 3 * width)
    assert settings.row_parameters(sparse) == expected


@pytest.mark.parametrize("tokens, sequences", [(1, 1), (5, 256), (5000, 7), (5000, 300)])
def test_the_largest_step_is_captured_and_none_beyond_it(settings, tokens, sequences):
    sizes = settings.capture_sizes(preset_config("tiny-qwen3"), tokens, sequences)
    assert sizes[0] == 1 and sizes[-1] == tokens
    assert min(sequences, tokens) in sizes


@pytest.mark.parametrize("name", ["cudagraph_capture_sizes", "max_cudagraph_capture_size"])
def test_sizes_that_a_user_gave_stay(settings, name):
    value = [1, 7] if name.endswith("sizes") else 64
    given = configured(settings, **{f"compilation_config__{name}": value})
    assert getattr(given.compilation_config, name) == value
    assert given.compilation_config.cudagraph_capture_sizes in (None, [1, 7])


REFUSED = {
    "parallel_config__tensor_parallel_size": (2, "tensor_parallel_size=2"),
    "parallel_config__pipeline_parallel_size": (2, "pipeline_parallel_size=2"),
    "parallel_config__decode_context_parallel_size": (2, "decode_context_parallel_size=2"),
    "parallel_config__enable_expert_parallel": (True, "enable_expert_parallel"),
    "model_config__quantization": ("fp8", "quantization 'fp8'"),
    "cache_config__cache_dtype": ("fp8", "kv_cache_dtype='fp8'"),
    "cache_config__kv_offloading_size": (4.0, "keys from a connector"),
    "kv_transfer_config": (object(), "keys from a connector"),
    "weight_transfer_config": (SimpleNamespace(backend="sparse_nccl"), "weights by 'sparse_nccl'"),
    "load_config__load_format": ("sharded_state", "load_format='sharded_state' .covered: auto,"),
    "lora_config": (object(), "merge the adapter"),
    "speculative_config": (object(), "speculation"),
    "model_config__runner_type": ("pooling", "runner 'pooling'"),
    "model_config__model_impl": ("transformers", "model_impl='transformers'"),
    "model_config__enable_prompt_embeds": (True, "enable_prompt_embeds"),
    "model_config__enable_return_routed_experts": (True, "enable_return_routed_experts"),
    "model_config__logits_processors": (["a"], "logits_processors"),
    "model_config__model_class_overrides": ({"Qwen3ForCausalLM": "a:B"}, "model_class_overrides"),
    "model_config__return_sampling_mask": (True, "return_sampling_mask"),
    "model_config__enable_trace_replay": (True, "enable_trace_replay"),
    "watermark_config": (object(), "watermark_config"),
    "model_config__multimodal_config": (object(), "text alone"),
    "model_config__logprobs_mode": ("raw_logits", "use 'processed_logprobs'"),
    "use_v2_model_runner": (False, "VLLM_USE_V2_MODEL_RUNNER=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_by_name(settings, name):
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        configured(settings, **{name: value})


@pytest.mark.parametrize("name", ["tensorizer", "runai_streamer_sharded", "ipc_cache", "own"])
def test_weights_past_load_weights_are_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=f"load_format='{name}'"):
        configured(settings, load_config__load_format=name)


@pytest.mark.parametrize("name", ["auto", "safetensors", "runai_streamer", "dummy"])
def test_checkpoints_that_reach_load_weights_are_taken(settings, name):
    configured(settings, load_config__load_format=name)


def test_an_installed_logits_processor_is_refused_by_name(settings, monkeypatch):
    found = [SimpleNamespace(name="ban")]
    monkeypatch.setattr(settings, "entry_points", lambda group: found)
    with pytest.raises(ValueError, match="installed packages: ban"):
        configured(settings)


def test_the_dtype_of_the_model_is_allowed_as_that_of_the_cache(settings):
    configured(settings, cache_config__cache_dtype="bfloat16")
    with pytest.raises(ValueError, match="kv_cache_dtype='float16'"):
        configured(settings, cache_config__cache_dtype="float16")


def test_vllms_own_invariant_mode_is_refused(settings, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT"):
        configured(settings)
