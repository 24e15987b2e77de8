import pytest
import torch

from rl_consistency.cases.probe import probe, probe_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_probe_is_the_same_bytes_again_and_finite_in_every_dtype(dtype):
    values = probe((64, 96), dtype, seed=3)
    assert values.dtype == dtype and values.shape == (64, 96)
    assert torch.equal(values, probe((64, 96), dtype, seed=3))
    assert not torch.equal(values, probe((64, 96), dtype, seed=4))
    assert values.isfinite().all()


def test_a_probe_spans_many_exponents_and_has_outlier_channels():
    values = probe((512, 64), seed=0)
    exponents = torch.frexp(values).exponent.float()
    assert exponents.quantile(0.99) - exponents.quantile(0.01) > 12
    sizes = values.square().mean(0).sqrt().sort(descending=True).values
    assert (sizes[:4] > 4 * sizes[4:].median()).all()


def sums_differ(rows):
    upward, downward = torch.zeros(len(rows)), torch.zeros(len(rows))
    for column in range(rows.shape[1]):
        upward = upward + rows[:, column]
        downward = downward + rows[:, -1 - column]
    return (upward != downward).float().mean().item()


def test_the_order_of_a_sum_shows_on_a_probe_and_not_on_small_integers():
    assert sums_differ(probe((64, 128), seed=1)) > 0.5
    integers = torch.randint(-8, 9, (64, 128)).float()
    assert sums_differ(integers) == 0.0


def test_scale_multiplies():
    assert torch.equal(probe((3, 8), scale=0.5), probe((3, 8)) * 0.5)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_an_empty_shape_is_refused(shape):
    with pytest.raises(ValueError, match="all positive"):
        probe(shape)


def test_token_sequences_depend_on_their_own_index_alone():
    a, b = probe_tokens([5, 9, 3], 300, seed=7), probe_tokens([2, 9], 300, seed=7)
    assert list(map(len, a)) == [5, 9, 3]
    assert a[1] == b[1] and a[0][:2] == b[0]
    assert probe_tokens([9], 300, seed=8) != probe_tokens([9], 300, seed=7)


def test_tokens_repeat_and_stay_in_the_vocabulary():
    tokens = probe_tokens([400], 151_936)[0]
    assert all(0 <= token < 151_936 for token in tokens)
    assert 100 < len(set(tokens)) < 300
    assert probe_tokens([3], 1) == [[0, 0, 0]]


def test_bad_token_requests_are_refused():
    with pytest.raises(ValueError, match="vocab_size"):
        probe_tokens([1], 0)
    with pytest.raises(ValueError, match="not negative"):
        probe_tokens([-1], 10)
