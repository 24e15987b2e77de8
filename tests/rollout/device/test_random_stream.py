"""The random stream is a pure function of (seed, prompt id, sample index, position)."""

import random

import numpy as np
import pytest
import torch

from rl_consistency.kernels.sampling.vocabulary_triton import philox_uniforms
from rl_consistency.rollout.device.random_stream import device_uniforms, stream_keys

WORD = np.uint64(0xFFFFFFFF)

# Known answers published with the generator: counter, key, output.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox(counter, key):
    """Philox-4x32-10 of each row, from the paper: counter [4, n] and key [2, n], 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ k1, product0 & WORD
        k0 = (k0 + np.uint64(0x9E3779B9)) & WORD
        k1 = (k1 + np.uint64(0xBB67AE85)) & WORD
    return np.stack([c0, c1, c2, c3])


def reference(keys, positions):
    """The numbers by way of `philox`."""
    seed_low, seed_high, *counter = keys.numpy().astype(np.uint64).T
    counter = np.stack([positions.numpy().astype(np.uint64), *counter])
    words = philox(counter, np.stack([seed_low, seed_high]))
    number = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return number.astype(np.float64) * 2.0**-53


def uniforms(seeds, prompt_ids, sample_indices, positions):
    keys = torch.from_numpy(stream_keys(seeds, prompt_ids, sample_indices))
    return device_uniforms(keys, torch.tensor(list(positions), dtype=torch.int64)).numpy()


def test_philox_gives_the_published_known_answers():
    counters, keys, outputs = (
        np.array(column, dtype=np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True)
    )
    np.testing.assert_array_equal(philox(counters, keys), outputs)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([-1], [0], [0], [0]), "seeds"),
        (([0], [2**64], [0], [0]), "prompt_ids"),
        (([0], [0], [2**32], [0]), "sample_indices"),
    ],
)
def test_a_key_that_does_not_fit_is_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        uniforms(*arguments)


def random_columns():
    """Seeds, prompt ids, sample indices and positions over their whole ranges, ends included."""
    rng = random.Random(5)
    return [
        [0, 2**bits - 1, *(rng.getrandbits(bits) for _ in range(300))] for bits in (64, 64, 32, 32)
    ]


def keys_and_positions():
    seeds, prompt_ids, sample_indices, positions = random_columns()
    keys = torch.from_numpy(stream_keys(seeds, prompt_ids, sample_indices))
    return keys, torch.tensor(positions, dtype=torch.int64)


@pytest.mark.parametrize("look_up", [device_uniforms, philox_uniforms])
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_looked_up_have_the_bits_of_the_generator(look_up, transposed):
    if look_up is philox_uniforms and torch.cuda.is_available():
        pytest.skip("tests/gpu has this on a GPU")
    keys, positions = keys_and_positions()
    expected = reference(keys, positions).tobytes()
    if transposed:
        keys = keys.t().contiguous().t()
    found = look_up(keys, positions)
    assert found.dtype == torch.float64
    assert found.numpy().tobytes() == expected


def test_a_swapped_key_word_fails_the_same_check():
    keys, positions = keys_and_positions()
    found = device_uniforms(keys[:, [1, 0, 2, 3, 4]], positions)
    assert found.numpy().tobytes() != reference(keys, positions).tobytes()


def test_no_keys_give_no_numbers():
    keys = torch.from_numpy(stream_keys([], [], []))
    assert keys.shape == (0, 5)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert device_uniforms(keys, nothing).shape == philox_uniforms(keys, nothing).shape == (0,)


def test_keys_of_another_form_are_refused():
    keys, positions = keys_and_positions()
    for bad in ((keys[:, :4], positions), (keys, positions[:-1]), (keys.int(), positions)):
        with pytest.raises(ValueError, match=r"need int64 \[n, 5\] and \[n\]"):
            device_uniforms(*bad)
    with pytest.raises(ValueError, match="sample_indices"):
        stream_keys([0], [0], [2**32])
