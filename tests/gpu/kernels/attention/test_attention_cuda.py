"""Attention on a GPU: packed, chunked and decoded, alone and among others, forward and backward."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from triton.compiler import CompiledKernel

from rl_consistency.cases.case import Heads
from rl_consistency.kernels.attention import forward_triton as attention_triton
from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import (
    attention_paged,
    attention_reference,
    attention_varlen,
)
from rl_consistency.kernels.attention.schedules import DECODE, PREFILL
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from tests.comparison import assert_within
from tests.gpu.kernels.attention.attention_cases import (
    BF16,
    BLOCK,
    DEVICE,
    EDGES,
    FP16,
    FP32,
    LENGTHS,
    LONG,
    MAIN,
    WINDOWED,
    Case,
    all_same,
    among,
    at_edges,
    attend,
    by_sequence,
    cached_keys,
    decoded,
    gradients,
    name,
    packed,
    paged,
    paged_layout,
    sequence,
    together,
)

pytestmark = pytest.mark.gpu


CASES = (
    MAIN,
    WINDOWED,
    Case(BF16, 64),
    Case(BF16, 80, 100),
    Case(BF16, 256, 200),
    Case(FP16, 96),
    Case(FP32, 64),
)
ENDS = (0, 1, 128, 129, 255, 1000, 2049, LONG)
CHUNKS = list(itertools.pairwise(ENDS))
SPREADS = (1, 7, 32)
"""Over how many programs the keys of a tile of few rows are spread."""


def decoded_alone(case):
    return [partial(paged, case, [(p, p + 1)]) for p in EDGES]


def heads(case):
    return Heads(case.heads, case.kv_heads, case.dim, case.window)


@pytest.fixture(scope="module", params=CASES, ids=name)
def case(request):
    """Each case, all its kernels compiled side by side."""
    found = request.param
    calls = [partial(gradients, found, [4]), partial(attend, found, [4]), partial(decoded, found)]
    calls += [partial(decoded, found, programs_per_tile=n) for n in SPREADS]
    together([*calls, *decoded_alone(found), *(partial(paged, found, [c]) for c in CHUNKS)])
    return found


def test_compiling_ahead_launches_nothing_and_what_it_compiled_is_found():
    case = Case(BF16, 80, 77)
    run, launched = partial(attend, case, [0]), []
    with patch.object(CompiledKernel, "launch_metadata", lambda *_: launched.append(1)):
        compile_ahead([run])
    assert not launched
    before = sum(len(c[0]) for c in attention_triton.attention_fwd_kernel.device_caches.values())
    run()
    after = sum(len(c[0]) for c in attention_triton.attention_fwd_kernel.device_caches.values())
    assert after == before


def test_output_and_gradients_match_fp64(case):
    for i, ours in gradients(case, [1, 2, 3]).items():
        q, k, v, do = (t.double() for t in sequence(case, i))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        exact = attention_reference(*leaves, **case.options)
        assert_within(among(case)[i][0], exact, "attention", case.dtype)
        exact.backward(do)
        for got, leaf in zip(ours, leaves, strict=True):
            # A lone token's dq and dk are zero but for rounding, hence the floor on the norm.
            error = (got.double() - leaf.grad).norm() / leaf.grad.norm().clamp(min=1e-2)
            assert error < (1e-4 if case.dtype == FP32 else 5e-2)


def test_lse_is_the_log_normalizer_of_the_scores(case):
    q, k, _, _ = (t.double() for t in sequence(case, 3))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) * case.dim**-0.5
    row = torch.arange(len(q), device=DEVICE)
    distance = row[:, None] - row
    hidden = (distance < 0) | (distance >= (case.window or LONG))
    exact = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
    assert_within(among(case)[3][1], exact, "attention", FP32)


def test_decode_gives_the_bytes_of_packed_prefill(case):
    expected = at_edges(among(case)[0])
    assert all_same(decoded(case), expected)
    for n in SPREADS:
        assert all_same(decoded(case, programs_per_tile=n), expected), n
    alone = [call() for call in decoded_alone(case)]
    assert all_same([torch.cat(part) for part in zip(*alone, strict=True)], expected)


def test_chunked_prefill_gives_the_bytes_of_packed_prefill(case):
    expected = among(case)[0]
    parts = [paged(case, [chunk]) for chunk in CHUNKS]
    assert all_same([torch.cat(part) for part in zip(*parts, strict=True)], expected)
    assert all_same(paged(case, CHUNKS), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(dtype):
    expected = [attend(MAIN, [0])[0], gradients(MAIN, [0])[0], decoded(MAIN, programs_per_tile=7)]
    torch.set_default_dtype(dtype)
    try:
        found = [attend(MAIN, [0])[0], gradients(MAIN, [0])[0], decoded(MAIN, programs_per_tile=7)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(all_same, found, expected))


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (20, 1)])
def test_any_number_of_heads_can_share_keys(heads, kv_heads):
    """A group of 3 does not divide a tile; one of 20 is more than the smallest tile holds."""
    case = Case(BF16, 64, heads=heads, kv_heads=kv_heads)
    whole, edges, spread, alone, among_others = together(
        [
            partial(attend, case, [0, 3]),
            partial(decoded, case, programs_per_tile=1),
            partial(decoded, case, programs_per_tile=7),
            partial(gradients, case, [3]),
            partial(gradients, case, [2, 3]),
        ]
    )
    assert all_same(edges, at_edges(whole[0])) and all_same(spread, edges)
    assert all_same(attend(case, [3])[3], whole[3])
    assert all_same(alone[3], among_others[3])
    exact = attention_reference(*sequence(case, 3)[:3], **case.options)
    assert_within(whole[3][0], exact, "attention", BF16)


@pytest.mark.parametrize("block_size", [7, 64])
def test_the_cache_block_size_does_not_matter(block_size):
    keys = cached_keys(MAIN, block_size)
    expected = at_edges(among(MAIN)[0])
    calls = [partial(decoded, MAIN, keys=keys, programs_per_tile=n) for n in (1, 7)]
    for found in together(calls):
        assert all_same(found, expected)
    assert all_same(paged(MAIN, [(129, 1000)], keys), [t[129:1000] for t in among(MAIN)[0]])


def test_a_nan_in_another_sequence_does_not_reach_this_one():
    """Forward only: backward expects finite neighbours. The cache of `paged` has NaN as well."""
    for case in (MAIN, WINDOWED, Case(BF16, 64)):
        for sick in (3, 4):
            q, k, v, _, layout = packed(case, range(len(LENGTHS)), gap=16, junk=torch.nan)
            start = layout.query_starts[sick]
            for whole in (q, k, v):
                whole[start : start + LENGTHS[sick]] = torch.nan
            found = attention_varlen(q, k, v, layout, **case.options)
            for i, rows in by_sequence(range(len(LENGTHS)), layout, found).items():
                assert i == sick or all_same(rows, among(case)[i])


def test_rows_of_no_sequence_are_zero_and_minus_infinity():
    q, k, v, _, layout = packed(MAIN, [2, 1], gap=16, junk=torch.nan)
    o, lse = attention_varlen(q, k, v, layout, **MAIN.options)
    outside = torch.ones(len(q), dtype=torch.bool)
    for start, n in zip(layout.query_starts, layout.query_lens, strict=True):
        outside[start : start + n] = False
    assert not o[outside].any() and o.isfinite().all()
    assert (lse[outside] == -torch.inf).all()
    do = torch.ones_like(o).masked_fill(outside.to(DEVICE)[:, None, None], 0.0)
    clean = [t.nan_to_num() for t in (q, k, v)]
    found = attention_bwd(do, *clean, o, lse, layout, *MAIN.options.values())
    assert not any(x[outside].any() for x in found)


@pytest.mark.large
@pytest.mark.parametrize("programs", [1, 7])
def test_a_cache_of_more_than_2_to_the_31_elements(programs):
    blocks = 2**31 // (BLOCK * MAIN.kv_heads * MAIN.dim) + 300
    small_keys, small_values, small_table = cached_keys(MAIN)
    spans = [(p, p + 1) for p in EDGES]
    first = blocks - len(small_keys)
    caches = []
    for small in (small_keys, small_values):
        cache_ = small.new_empty(blocks, *small.shape[1:])
        assert cache_.numel() > 2**31
        cache_[first:] = small
        caches.append(cache_)
    table = [first + block for block in small_table]
    found = paged(MAIN, spans, (*caches, table), programs_per_tile=programs)
    assert all_same(found, at_edges(among(MAIN)[0]))


@pytest.mark.large
def test_packed_rows_past_2_to_the_31_elements():
    case = Case(BF16, 128, kv_heads=4)
    parts = sequence(case, 3)
    start = 2**31 // (case.heads * case.dim) + 16
    wholes = [x.new_zeros(start + len(x), *x.shape[1:]) for x in parts]
    for whole, part in zip(wholes, parts, strict=True):
        whole[start:] = part
    q, k, v, do = wholes
    layout = PackedSequences.of([start], [LENGTHS[3]])
    o, lse = attention_fwd(q, k, v, layout, *case.options.values())
    assert all_same([o[start:], lse[start:]], attend(case, [3])[3])
    found = attention_bwd(do, q, k, v, o, lse, layout, *case.options.values())
    assert all_same([x[start:] for x in found], gradients(case, [3])[3])


def test_bad_operands_are_refused():
    q, k, v, _, layout = packed(MAIN, [2])
    with pytest.raises(ValueError, match="k is on cpu but q is on cuda"):
        attention_varlen(q, k.cpu(), v, layout, **MAIN.options)
    with (
        torch.autocast("cuda", torch.bfloat16),
        pytest.raises(ValueError, match="autocast is on for cuda"),
    ):
        attention_varlen(q, k, v, layout, **MAIN.options)
    q, k, v, _, layout = packed(Case(BF16, 32), [2])
    for schedule, match in (
        (PREFILL[0], "specialised warps need sm_90"),
        (DECODE[0], "a ring of buffers needs sm_90, a paged cache"),
    ):
        with pytest.raises(ValueError, match=match):
            attention_fwd(q, k, v, layout, 1.0, None, schedule=schedule)


@pytest.mark.parametrize(
    "case",
    [MAIN, WINDOWED, Case(BF16, 80, heads=6), Case(FP16, 96, 300), Case(FP32, 32)],
    ids=name,
)
def test_sequences_without_a_past_may_read_keys_where_the_call_has_them(case):
    """Prompts, continued prompts and decoded tokens in one call, and prompts alone."""
    parts = sequence(case, 0)[:3]
    for spans in ([(0, 700), (129, 1000), (0, 1), (4095, 4096), (0, 129)], [(0, 250), (0, 2048)]):
        layout = paged_layout(spans, *cached_keys(case))
        q, k, v = (torch.cat([t[start:end] for start, end in spans]) for t in parts)
        call = partial(attention_paged, q, layout, 0, **case.options)
        expected = [torch.cat([t[start:end] for start, end in spans]) for t in among(case)[0]]
        assert all_same(call(new=(k, v)), expected)
        assert all_same(call(), expected)
        assert not all_same(call(new=(k, v + 1)), expected)


@pytest.mark.parametrize("case", [Case(BF16, 80, 100), MAIN, Case(BF16, 256)], ids=name)
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
