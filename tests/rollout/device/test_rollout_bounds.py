"""The calls that stand for all others: no attention kernel of a later call is left out."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels.attention import schedules
from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.attention.schedules import plan_forward
from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.device import rollout_bounds
from rl_consistency.rollout.device.rollout_bounds import (
    RolloutBounds,
    attention_kernels,
    ragged_shapes,
)

BLOCK_SIZE = 16
HEADS = [(14, 2, 64), (16, 8, 128), (28, 4, 128), (8, 1, 64), (8, 4, 256), (20, 20, 80)]
BOUNDS = [(40, 600, 512), (256, 8192, 4096), (64, 2048, 40960)]
"""Sequences, tokens of a step, and tokens of the longest sequence."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """An H200, by what it says of itself."""
    monkeypatch.setattr(schedules, "sm_count", lambda device: 132)
    for name in ("has_tma", "has_wgmma"):
        monkeypatch.setattr(schedules, name, lambda device: True)


def bounds_of(sequences, tokens, longest):
    return RolloutBounds(tokens=tokens, sequences=sequences, longest=longest, batch_sizes=(1,))


def cache_of(kv_heads, head_dim):
    return torch.empty(2, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16)


def ahead(monkeypatch, heads, cache, windows, bounds):
    """The shapes, and the kernels that they meet, by window."""
    monkeypatch.setattr(rollout_bounds, "attention_windows", lambda model: windows)
    model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads))
    shapes = ragged_shapes(bounds, attention_kernels(model, cache))
    shapes = [shape for shape in shapes if shape.past]
    return shapes, [
        {kernel([s.queries] * s.sequences, [s.past] * s.sequences, heads, cache, w) for s in shapes}
        for w in windows
    ]


def kernel(queries, pasts, heads, cache, window):
    q = torch.empty(1, heads, cache.shape[-1], dtype=cache.dtype).expand(sum(queries), -1, -1)
    keys = cache.view(-1, *cache.shape[2:])
    return plan_forward(q, keys, keys, layout_of(queries, pasts, cache), window).kernel


def chunks(draw, bounds):
    """Random lengths of chunks and of what they continue, within the bounds."""
    count = draw.choice([1, 2, 3, draw.randint(1, bounds.sequences), draw.randint(1, 40)])
    most = draw.choice([1, 1, 2, 3, 4, 8, 16, 100])
    queries = [draw.choice([1, draw.randint(1, most)]) for _ in range(count)]
    while sum(queries) > bounds.tokens:
        queries.pop()
    longest = draw.choice([30, 200, bounds.longest - most, bounds.longest - most])
    return queries, [draw.randint(1, min(longest, bounds.longest - most)) for _ in queries]


def layout_of(queries, pasts, cache):
    contexts = [n + past for n, past in zip(queries, pasts, strict=True)]
    return PagedAttention(
        query_starts=[sum(queries[:i]) for i in range(len(queries))],
        query_lens=queries,
        context_lens=contexts,
        block_tables=[range(cdiv(keys, BLOCK_SIZE)) for keys in contexts],
        slot_mapping=torch.empty(0, dtype=torch.int64),
        key_cache=(cache,),
        value_cache=(cache,),
        block_size=BLOCK_SIZE,
    )


@pytest.mark.parametrize("windows", [[None], [None, 1000]], ids=["full", "windowed"])
@pytest.mark.parametrize("heads, kv_heads, head_dim", HEADS)
@pytest.mark.parametrize("sizes", BOUNDS)
def test_every_chunk_behind_a_past_meets_a_kernel_of_the_shapes(
    sizes, heads, kv_heads, head_dim, windows, monkeypatch
):
    bounds, cache = bounds_of(*sizes), cache_of(kv_heads, head_dim)
    shapes, met = ahead(monkeypatch, heads, cache, windows, bounds)
    assert max(map(len, met)) <= len(shapes) < 80
    draw = random.Random(heads)
    for _ in range(100):
        queries, pasts = chunks(draw, bounds)
        for window, kernels in zip(windows, met, strict=True):
            assert kernel(queries, pasts, heads, cache, window) in kernels, (queries, pasts)


def test_few_numbers_of_sequences_would_leave_kernels_out(monkeypatch):
    """Negative control."""
    bounds, cache = bounds_of(256, 8192, 4096), cache_of(2, 64)
    _, [met] = ahead(monkeypatch, 14, cache, [None], bounds)
    monkeypatch.setattr(rollout_bounds, "EVERY_NUMBER_TO", 1)
    monkeypatch.setattr(rollout_bounds, "SEQUENCES_GROWTH", 300)
    _, [few] = ahead(monkeypatch, 14, cache, [None], bounds)
    assert few < met


def test_stock_attention_has_no_kernel_of_ours(monkeypatch):
    """Nor is it refused where ours would not fit the device."""
    monkeypatch.setattr(schedules, "shared_memory", lambda device: 99 << 10)
    monkeypatch.setattr(rollout_bounds, "attention_windows", lambda model: [None])
    cache, bounds = cache_of(8, 128).float(), bounds_of(40, 600, 512)
    model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=16))
    with strict(except_=["attention"]):
        shapes = list(ragged_shapes(bounds, attention_kernels(model, cache)))
    assert sum(shape.past > 0 for shape in shapes) == 1
    with pytest.raises(ValueError, match="needs 136 KB"):
        list(ragged_shapes(bounds, attention_kernels(model, cache)))


def test_each_draft_without_a_graph_samples_more_rows():
    def most(draft):
        bounds = replace(bounds_of(3, 100, 64), draft=draft)
        return max(shape.sampled for shape in ragged_shapes(bounds, lambda shape: 0))

    assert (most(0), most(4)) == (3, 15)


@pytest.mark.parametrize("sizes", [*BOUNDS, (2, 100, 30), (1, 1, 2), (3, 40, 17)])
def test_shapes_stay_within_the_bounds_and_continue_a_past(sizes, monkeypatch):
    bounds = bounds_of(*sizes)
    shapes, _ = ahead(monkeypatch, 16, cache_of(8, 128), [None], bounds)
    shapes += ragged_shapes(bounds, lambda shape: 0)
    for shape in shapes:
        assert shape.sequences * shape.queries <= bounds.tokens
        assert shape.sequences <= bounds.sequences
        assert shape.past + shape.queries <= bounds.longest
        assert 1 <= shape.sampled <= shape.sequences * shape.queries
    assert {shape.past > 0 for shape in shapes} == {True, False}
