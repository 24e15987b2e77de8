"""The memory of a cache: attention has the same bytes wherever the heads of a token lie."""

import itertools

import pytest

from tests.gpu.kernels.attention.attention_cases import (
    BF16,
    FP32,
    LONG,
    Case,
    all_same,
    among,
    at_edges,
    cached_keys,
    decoded,
    paged,
)

pytestmark = pytest.mark.gpu

CHUNKS = list(itertools.pairwise((0, 129, 1000, LONG)))
CASES = [Case(BF16, 64), Case(BF16, 80, 100), Case(BF16, 128), Case(BF16, 256), Case(FP32, 64)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_and_prefill_do_not_depend_on_how_the_heads_of_the_cache_lie(case):
    *caches, table = cached_keys(case)
    other = [
        x.contiguous() if not x.is_contiguous() else x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in (cache.flatten(0, 1)[None] for cache in caches)
    ]
    moved = [x.view(cache.shape) for x, cache in zip(other, caches, strict=True)]
    assert all(x.stride() != cache.stride() for x, cache in zip(moved, caches, strict=True))
    expected = among(case)[0]
    assert all_same(decoded(case, keys=(*moved, table)), at_edges(expected))
    assert all_same(paged(case, CHUNKS, keys=(*moved, table)), expected)
