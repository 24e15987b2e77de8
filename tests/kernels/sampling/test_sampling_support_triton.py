"""The support found without a sort, in Triton's interpreter, against the one found with a sort."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from rl_consistency.kernels.sampling import support_triton as sampling_support_triton
from rl_consistency.kernels.sampling import vocabulary_triton
from rl_consistency.kernels.sampling.op import (
    SamplingRows,
    distribution,
    triton_distribution,
)
from rl_consistency.kernels.sampling.support_triton import share
from rl_consistency.kernels.sampling.vocabulary_triton import order_key
from tests.kernels.sampling.references import KINDS, by_selection, by_sort, logits

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU"),
    # The interpreter divides -inf and subtracts infinities in numpy, which warns.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# The interpreter takes a tenth of a second a row: tests/gpu has thousands.
SETTINGS = [
    {"top_k": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "top_p": 0.5},
    {"top_k": 60, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 100.0, "top_k": 10**6, "top_p": 0.5},
    {"min_p": 0.1},
    {},
    {"temperature": 1e-4, "top_k": 2, "top_p": 0.999, "min_p": 1.0},
]


def mixed_rows(count=8):
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(count)]
    return SamplingRows.concatenate([SamplingRows.uniform(1, **s) for s in settings])


def agrees(kind, vocabulary=300, rows=None):
    rows = rows or mixed_rows()
    values = logits(kind, len(rows.top_k), vocabulary)
    return torch.equal(by_selection(values, rows), by_sort(values, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_the_support_is_the_one_a_sort_gives(kind):
    assert agrees(kind)


def test_a_vocabulary_of_several_tiles_and_splits():
    assert agrees("plain", 5000)


def test_more_blocks_than_a_tile_has_ids(monkeypatch):
    monkeypatch.setattr(sampling_support_triton, "TILE", 128)
    assert agrees("plain", 128 * 130, SamplingRows.uniform(1, top_k=5, min_p=0.01))


@pytest.mark.parametrize("top_k", [1, 2, 5, 9, 10])
def test_of_equal_logits_the_lowest_ids_are_kept(top_k):
    values = torch.zeros(1, 700)
    values[0, 5], values[0, ::100] = 2.0, 1.0  # seven ids at 1.0, in blocks far apart
    kept = by_selection(values, SamplingRows.uniform(1, top_k=top_k))[0].nonzero().flatten()
    assert kept.tolist() == sorted([5, *range(0, 700, 100), 1, 2][:top_k])


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}])
@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.52, 0.999])
def test_top_p_ends_among_equal_logits(top_p, settings):
    values = torch.zeros(1, 300)
    values[0, 5], values[0, ::40] = 2.0, 1.0
    rows = SamplingRows.uniform(1, top_p=top_p, **settings)
    assert torch.equal(by_selection(values, rows), by_sort(values, rows))


def test_rows_that_keep_all_are_left_whole():
    rows = SamplingRows.concatenate([SamplingRows.uniform(2), SamplingRows.uniform(1, top_k=2)])
    kept = by_selection(logits("plain", 3, 200), rows)
    assert kept.sum(1).tolist() == [200, 200, 2]


def test_a_nan_stays_in_its_row_and_disturbs_no_other():
    values, rows = logits("plain", 9, 140), mixed_rows(9)
    clean = triton_distribution(values, rows)
    for bad in (torch.nan, torch.inf):
        spoilt = values.clone()
        spoilt[::3, 7] = bad
        one = triton_distribution(spoilt, rows)
        assert one.log_normalizer[::3].isnan().all()
        for i in (1, 2):
            assert one.log_normalizer[i::3].equal(clean.log_normalizer[i::3])
            assert one.scaled[i::3].equal(clean.scaled[i::3])


def test_a_row_of_minus_infinity_has_no_logprob():
    values, rows = torch.full((8, 40), -torch.inf), mixed_rows()
    assert triton_distribution(values, rows).logprobs_of(torch.zeros(8).long()).isnan().all()


def test_the_support_is_that_of_a_cpu():
    """Their exps differ in the last bit, which hardly ever moves a boundary."""
    values, rows = logits("plain", 8, 400), mixed_rows()
    ours, cpu = triton_distribution(values, rows).scaled, distribution(values, rows).scaled
    assert torch.equal(ours == -torch.inf, cpu == -torch.inf)


def test_no_rows_have_no_support():
    empty = SamplingRows.uniform(0, top_k=2)
    assert by_selection(torch.zeros(0, 9), empty).shape == (0, 9)


def test_strided_rows_and_parameters():
    values, rows = logits("plain", 4, 140), mixed_rows(4)
    wide = torch.full((4, 350), 99.0)
    wide[:, :140] = values
    assert torch.equal(by_selection(wide[:, :140], rows), by_sort(values, rows))
    doubled = SamplingRows(
        **{
            f.name: getattr(rows, f.name).repeat_interleave(2)[::2]
            for f in dataclasses.fields(rows)
        }
    )
    ours = triton_distribution(values, doubled)
    assert ours.scaled.equal(triton_distribution(values, rows).scaled)


def test_equal_logits_in_the_other_order_fail_the_same_check(monkeypatch):
    sort = torch.sort

    def mutant(values, **options):
        ranked, order = sort(values.flip(1), **options)
        return ranked, values.shape[1] - 1 - order

    monkeypatch.setattr(torch, "sort", mutant)
    assert not agrees("ties", rows=mixed_rows(1))


@triton.jit
def share_plus_one(p, total):
    return share(p, total) + 1


@triton.jit
def signed_key(z):
    """-0 below 0."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def test_zeros_of_both_signs_are_equal(monkeypatch):
    values, rows = torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), SamplingRows.uniform(1, top_k=2)
    assert by_selection(values, rows).tolist() == [[False, True, True, False]]
    for module in (sampling_support_triton, vocabulary_triton):
        monkeypatch.setattr(module, "order_key", signed_key)
    assert by_selection(values, rows).tolist() != [[False, True, True, False]]


def test_a_threshold_off_by_one_fails_the_tie_check(monkeypatch):
    """Half the mass of four equal logits is two of them exactly."""
    values, rows = torch.zeros(1, 4), SamplingRows.uniform(1, top_p=0.5)
    assert by_selection(values, rows).tolist() == [[True, True, False, False]]
    monkeypatch.setattr(sampling_support_triton, "share", share_plus_one)
    assert by_selection(values, rows).tolist() != [[True, True, False, False]]


def test_keys_rank_as_a_sort_does():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (4000,), generator=generator, dtype=torch.int64)
    values = patterns.to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45])])
    keys = torch.empty(len(values), dtype=torch.int32)
    key_kernel[(triton.cdiv(len(values), 1024),)](values, keys, len(values), N=1024)
    ranked = torch.sort(values, stable=True, descending=True).indices
    assert torch.equal(ranked, torch.sort(keys, stable=True, descending=True).indices)


@triton.jit
def key_kernel(x, y, count, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, order_key(tl.load(x + i, mask=i < count)), mask=i < count)
