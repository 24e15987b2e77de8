"""How vLLM's memory of a layer is seen, in the layouts of its releases."""

import pytest
import torch

from rl_consistency.kernels.attention.paged_cache_triton import require_cache

BLOCKS, SIZE, HEADS, DIM = 5, 16, 2, 32


@pytest.fixture
def cache():
    from rl_consistency.integrations.vllm import cache

    return cache


def memory_of(release):
    if release == "0.26":
        return torch.zeros(BLOCKS, SIZE, 2 * HEADS, DIM)
    return torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)  # [B, H, N, C]


@pytest.mark.parametrize("release", ["0.26", "0.31"])
def test_keys_and_values_are_views_that_the_ops_take(cache, release):
    layer = cache.CacheLayer(4, HEADS, DIM, torch.float32)
    layer.kv_cache = memory_of(release)
    keys, values = layer.keys_and_values
    assert keys.shape == values.shape == (BLOCKS, SIZE, HEADS, DIM)
    new = torch.ones(3, HEADS, DIM)
    require_cache(new, new, keys, values, torch.arange(3))
    keys.fill_(1.0)
    values.fill_(2.0)
    assert layer.kv_cache.sum() == 3 * keys.numel()  # all of the memory, and each place once
    assert keys.unique().tolist() == [1.0]


@pytest.mark.parametrize("release", ["0.26", "0.31"])
def test_kernels_are_compiled_for_the_layout_of_the_release(cache, release, monkeypatch):
    if release != "0.26":
        monkeypatch.delattr(cache.AttentionBackend, "get_kv_cache_shape")
    block = cache.empty_block(SIZE, HEADS, DIM, torch.zeros(1))
    found = cache.keys_and_values(block, DIM)[0].stride()
    assert found == cache.keys_and_values(memory_of(release), DIM)[0].stride()


def test_a_layer_says_what_vllm_allocates(cache):
    layer = cache.CacheLayer(4, HEADS, DIM, torch.bfloat16)
    from tests.integrations.vllm.fake_vllm import SimpleNamespace

    given = SimpleNamespace(cache_config=SimpleNamespace(block_size=SIZE))
    spec = layer.get_kv_cache_spec(given)
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (SIZE, HEADS, DIM)
    assert spec.dtype == torch.bfloat16
    backend = layer.get_attn_backend()
    shape = backend.get_kv_cache_shape(BLOCKS, SIZE, HEADS, DIM, "auto")
    assert shape == memory_of("0.26").shape
    layer.kv_cache = torch.tensor([])  # what vLLM leaves at its end
